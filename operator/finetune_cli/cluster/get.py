"""`finetune get` on a cluster."""

import argparse
import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from urllib.parse import urlsplit

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from finetune_cli.cluster.pods import list_pods
from finetune_cli.cluster.session import (
    POLL_SECONDS,
    ClusterSession,
    Object,
    connect,
    refresh,
    with_retries,
)
from finetune_cli.diagnostics import UsageError
from finetune_cli.manifest.fields import gate_lines
from finetune_cli.outcome import exit_code, has_finished, ready_message
from finetune_cli.output.costs import cost_lines
from finetune_cli.output.model_text import model_text
from finetune_cli.output.notes import with_notes
from finetune_cli.output.status.text import interruptions_line
from finetune_cli.output.status.tree import live_table
from finetune_cli.output.table import COLUMNS, fitted, row
from finetune_operator.api.conditions import READY
from finetune_operator.api.group import API_VERSION, KIND
from finetune_operator.api.status import AttemptStatus
from finetune_operator.core.metadata import service_name
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.translate.pod import ObservedPod
from finetune_trainer.contract.usage import PROMPT

HTTP_PORT = 80


def run(arguments: argparse.Namespace) -> int:
    """Show one pipeline, or list all."""
    return asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    if arguments.name and arguments.all_namespaces:
        raise UsageError(
            "-A lists all pipelines; to show one pipeline, give its namespace with -n instead"
        )
    if arguments.watch and (arguments.json or not arguments.name):
        raise UsageError("-w watches one pipeline: give its name, and leave out --json")
    # Without wrapping, a line stays one line for grep and in a narrow terminal's scrollback.
    console = Console(highlight=False, soft_wrap=True)
    async with connect(arguments) as session:
        if not session.name:
            return await _list(session, arguments, console)
        if arguments.watch:
            return await _watch(session, console)
        if arguments.json:
            live = await session.get_object()
            shown = with_notes(_without_managed_fields(live))
            print(json.dumps(shown, indent=1))
            return 0
        pipeline = await session.get_pipeline()
        pods = await list_pods(session)
        console.print(tree(pipeline, pods, _now()))
    return 0


def _without_managed_fields(pipeline: Object) -> Object:
    # As kubectl shows objects: the managed fields are longer than all others together.
    meta = {
        name: value
        for name, value in pipeline["metadata"].items()
        if name != "managedFields"
    }
    return {**pipeline, "metadata": meta}


async def _list(
    session: ClusterSession, arguments: argparse.Namespace, console: Console
) -> int:
    namespace: str | None = session.context.namespace
    if arguments.all_namespaces:
        namespace = None
    path = paths.pipelines(namespace)
    pipelines = [_without_managed_fields(item) async for item in session.api.list(path)]
    if arguments.json:
        items = [with_notes(pipeline) for pipeline in pipelines]
        listed = {"apiVersion": API_VERSION, "kind": f"{KIND}List", "items": items}
        print(json.dumps(listed, indent=1))
        return 0
    if not pipelines:
        scope = "any namespace"
        if namespace:
            scope = f"the namespace {namespace}"
        console.print(f"no pipelines in {scope}")
        return 0
    now = _now()
    namespaces = [pipeline["metadata"]["namespace"] for pipeline in pipelines]

    def rows(gain: bool) -> list[tuple[str, ...]]:  # noqa: FBT001  a table with or without it
        cells = [
            (*COLUMNS, "REASON"),
            *(_row(pipeline, now, gain=gain) for pipeline in pipelines),
        ]
        if namespace is not None:
            return cells
        first_column = ["NAMESPACE", *namespaces]
        return [(first, *row) for first, row in zip(first_column, cells, strict=True)]

    for line in fitted(rows):
        console.print(line, markup=False)
    return 0


def _row(pipeline: Object, now: datetime, *, gain: bool) -> tuple[str, ...]:
    status = pipeline.get("status") or {}
    reason = ""
    for condition in status.get("conditions") or []:
        if condition.get("type") == READY:
            reason = str(condition.get("reason") or "")
    return (*row(pipeline, now, gain=gain), reason)


async def _watch(session: ClusterSession, console: Console) -> int:
    """Show the pipeline until it has finished: redrawn in place on a terminal, else printed again on every change."""
    pipeline = await session.get_pipeline()
    printed = ""
    screen: AbstractContextManager[Live | None] = nullcontext()
    if console.is_terminal:
        # By default, rich cuts off the end of what is higher than the terminal.
        screen = Live(console=console, auto_refresh=False, vertical_overflow="visible")
    with screen as live:
        while True:
            pods = await with_retries(lambda: list_pods(session))
            if live:
                live.update(tree(pipeline, pods, _now()), refresh=True)
            else:
                # Without the time: it would print the same tree every second.
                text = _to_text(tree(pipeline, pods, None))
                if text != printed:
                    print(text, flush=True)
                printed = text
            if has_finished(pipeline):
                return exit_code(pipeline.status)
            await asyncio.sleep(POLL_SECONDS)
            pipeline = await refresh(session)


def _to_text(tree: RenderableType) -> str:
    console = Console(highlight=False, soft_wrap=True)
    with console.capture() as captured:
        console.print(tree)
    return captured.get()


def _now() -> datetime:
    return datetime.now(UTC)  # noqa: TID251  an edge


def tree(
    pipeline: Pipeline, running: Mapping[str, ObservedPod], now: datetime | None
) -> RenderableType:
    """Return the tree of stages, attempts and pods, followed by the summary; `now` adds the time of what runs."""

    def pods(attempt: AttemptStatus) -> Sequence[str]:
        pod = running.get(attempt.job)
        if pod is None:
            return (f"job {attempt.job}: no pod",)
        node = pod.node or "no node yet"
        return (f"pod {pod.name} on {node}: {pod.phase}",)

    lines = [Text(line) for line in _summary(pipeline)]
    return Group(live_table(str(pipeline.key), pipeline.status, pods, now=now), *lines)


def _summary(pipeline: Pipeline) -> Iterable[str]:
    status = pipeline.status
    if status.interruptions:
        yield interruptions_line(status)
    yield from cost_lines(status)
    yield from gate_lines(status)
    if status.model:
        yield f"model: {model_text(status.model)}"
        endpoint = status.model.endpoint
        if endpoint:
            command = port_forward(pipeline, endpoint)
            yield f"endpoint {endpoint} inside the cluster; from this machine: {command}"
            yield f"ask: finetune ask {pipeline.key.name} -n {pipeline.key.namespace} {PROMPT}"
    yield ready_message(status) or "not yet reconciled by the operator"


def port_forward(pipeline: Pipeline, endpoint: str) -> str:
    """Return the command that makes the Service of the model server available on port 8000 of this machine."""
    port = urlsplit(endpoint).port or HTTP_PORT
    service = service_name(pipeline.key.name)
    return f"kubectl port-forward -n {pipeline.key.namespace} service/{service} 8000:{port}"
