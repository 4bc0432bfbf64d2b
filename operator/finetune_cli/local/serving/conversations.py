"""Conversations with the models of a run on this machine, served by `--keep-serving` or for this command."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from finetune_cli.conversation import BASE, TRAINED, ModelConversation
from finetune_cli.diagnostics import UsageError
from finetune_cli.local.published import (
    has_turns,
    model_argument,
    published_model,
    run_environment,
)
from finetune_cli.local.serving.model_server import LocalEndpoint, model_server
from finetune_cli.local.serving.serving import kept_server
from finetune_cli.local.summary import run_argument
from finetune_operator.local.pipeline_file import PipelineFile
from finetune_trainer.contract import PrepareResult


@contextmanager
def local_conversations(
    folder: Path, labels: Sequence[str], max_tokens: int
) -> Iterator[list[ModelConversation]]:
    """Yield a conversation with each model; raise UsageError or ClusterError.

    The servers that are started for them are stopped at the end of the block.
    """
    pipeline = PipelineFile(folder).read()
    uri = published_model(pipeline)
    if pipeline is None or uri is None:
        raise UsageError(
            f"{folder.name} has published no merged model to ask: add a target of format Merged to spec.push.targets, "
            f"then finetune run {run_argument(folder)}"
        )
    environment = run_environment(folder, pipeline)
    data = pipeline.status.result(PrepareResult)
    programs = {
        TRAINED: [model_argument(environment, uri)],
        BASE: [model_argument(environment, pipeline.spec.model.uri)],
    }
    if data is not None and data.model_pin:
        programs[BASE] += ["--pin", data.model_pin]
    endpoints: list[LocalEndpoint] = []
    started = []
    with ExitStack() as stack:
        # All start before the first is waited for: each takes seconds to import its libraries.
        for label in labels:
            endpoint = kept_server(folder, uri) if label == TRAINED else None
            if endpoint is None:
                program = model_server(programs[label], environment)
                server = stack.enter_context(program)
                started.append(server)
                endpoint = server.endpoint
            endpoints.append(endpoint)
        for server in started:
            server.wait_until_ready()
        yield [
            ModelConversation(label, endpoint, has_turns(pipeline), max_tokens)
            for label, endpoint in zip(labels, endpoints, strict=True)
        ]
