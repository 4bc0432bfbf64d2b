"""Questions to the model of a run on this machine, or of a pipeline on a cluster."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from finetune_cli.arguments import client_module, find_workdir, targets_cluster
from finetune_cli.conversation import BASE, MAX_TOKENS, TRAINED, ModelConversation
from finetune_cli.diagnostics import UsageError
from finetune_cli.local.serving.conversations import local_conversations


def ask(
    run: str,
    question: str,
    *,
    base: bool = False,
    max_tokens: int = MAX_TOKENS,
    workdir: Path | None = None,
    context: str | None = None,
    namespace: str | None = None,
) -> Iterator[str]:
    """Yield the answer of a run's model piece by piece; with `base`, the answer of its base model.

    `run` is the name of a run on this machine or of a pipeline on a cluster, or the manifest of a run, as in
    `finetune ask`. On this machine a model server is started for the call, which takes seconds, and stopped at its
    end; a server of `finetune run --keep-serving` is used in its place. On a cluster the deployed server answers.
    Raise UsageError or ClusterError. `"".join(ask(…))` is the whole answer.
    """
    arguments = argparse.Namespace(
        name=run, workdir=workdir, context=context, namespace=namespace
    )
    label = BASE if base else TRAINED
    with conversations(arguments, [label], max_tokens) as [conversation]:
        yield from conversation.ask(question)


@contextmanager
def conversations(
    arguments: argparse.Namespace, labels: Sequence[str], max_tokens: int = MAX_TOKENS
) -> Iterator[list[ModelConversation]]:
    """Yield a conversation with each model, TRAINED or BASE; raise UsageError or ClusterError."""
    if not targets_cluster(arguments.name, arguments):
        folder = find_workdir(arguments.name, arguments.workdir)
        with local_conversations(folder, labels, max_tokens) as opened:
            yield opened
        return
    if BASE in labels:
        raise UsageError(
            "a cluster serves the trained model only: --base is for a run on this machine"
        )
    yield [
        client_module("finetune_cli.cluster.conversation").open_conversation(
            arguments, max_tokens
        )
    ]
