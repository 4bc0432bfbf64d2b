"""`finetune get` on a cluster."""

import argparse
import asyncio
import json
from collections.abc import Iterable, Sequence
from contextlib import nullcontext

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from finetune_cli.cluster.pods import list_pods
from finetune_cli.cluster.session import POLL_SECONDS, ClusterSession, Object, connect, refresh, with_retries
from finetune_cli.diagnostics import UsageError
from finetune_cli.display import gate_line, interruptions_line, live_table
from finetune_cli.pipeline_status import exit_code, has_finished, ready_message
from finetune_operator.api.conditions import READY
from finetune_operator.api.group import API_VERSION, KIND
from finetune_operator.api.status import AttemptStatus
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.cache import ResourceCache

COLUMNS = ("NAME", "PHASE", "STAGE", "PROGRESS", "ATTEMPT", "REASON")


def run(arguments: argparse.Namespace) -> int:
    """Show one pipeline, or list all."""
    return asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    if arguments.name and arguments.all_namespaces:
        raise UsageError("-A lists all pipelines; to show one, give its namespace with -n instead")
    if arguments.watch and (arguments.json or not arguments.name):
        raise UsageError("-w watches one pipeline: give its name, and leave out --json")
    console = Console(highlight=False, soft_wrap=True)
    async with connect(arguments) as session:
        if not session.name:
            return await _list(session, arguments, console)
        if arguments.watch:
            return await _watch(session, console)
        if arguments.json:
            print(json.dumps(_without_managed_fields(await session.get_object()), indent=1))
        else:
            pipeline = await session.get_pipeline()
            console.print(_tree(pipeline, await list_pods(session)))
    return 0


def _without_managed_fields(pipeline: Object) -> Object:
    meta = {name: value for name, value in pipeline["metadata"].items() if name != "managedFields"}
    return {**pipeline, "metadata": meta}


async def _list(session: ClusterSession, arguments: argparse.Namespace, console: Console) -> int:
    namespace = None if arguments.all_namespaces else session.context.namespace
    pipelines = [_without_managed_fields(one) async for one in session.api.list(paths.pipelines(namespace))]
    if arguments.json:
        print(json.dumps({"apiVersion": API_VERSION, "kind": f"{KIND}List", "items": pipelines}, indent=1))
        return 0
    if not pipelines:
        console.print(f"no pipelines in {f'the namespace {namespace}' if namespace else 'any namespace'}")
        return 0
    first = () if namespace else ("NAMESPACE",)
    rows = [(*first, *COLUMNS), *((one["metadata"]["namespace"],)[: len(first)] + _row(one) for one in pipelines)]
    for line in _aligned(rows):
        console.print(line, markup=False)
    return 0


def _row(pipeline: Object) -> tuple[str, ...]:
    status = pipeline.get("status") or {}
    reason = next((one["reason"] for one in status.get("conditions") or [] if one["type"] == READY), "")
    values = (status.get("phase"), status.get("stage"), status.get("progress"), status.get("attempt"), reason)
    return (pipeline["metadata"]["name"], *(str(value or "") for value in values))


def _aligned(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


async def _watch(session: ClusterSession, console: Console) -> int:
    """Show the pipeline until it has finished: redrawn in place on a terminal, else printed again on every change."""
    pipeline, printed = await session.get_pipeline(), ""
    terminal = Live(console=console, auto_refresh=False, vertical_overflow="visible")
    with terminal if console.is_terminal else nullcontext() as live:
        while True:
            tree = _tree(pipeline, await with_retries(lambda: list_pods(session)))
            if live:
                live.update(tree, refresh=True)
            elif (text := _to_text(tree)) != printed:
                print(printed := text, flush=True)
            if has_finished(pipeline):
                return exit_code(pipeline.status)
            await asyncio.sleep(POLL_SECONDS)
            pipeline = await refresh(session)


def _to_text(tree: RenderableType) -> str:
    console = Console(highlight=False, soft_wrap=True)
    with console.capture() as captured:
        console.print(tree)
    return captured.get()


def _tree(pipeline: Pipeline, cache: ResourceCache) -> RenderableType:
    """Return the tree of stages, attempts and pods, followed by the summary."""
    namespace = pipeline.key.namespace

    def pods(attempt: AttemptStatus) -> Sequence[str]:
        pod = cache.pods.get((namespace, attempt.job))
        if pod is None:
            return (f"job {attempt.job}: no pod",)
        return (f"pod {pod.name} on {pod.node or 'no node yet'}: {pod.phase}",)

    lines = [Text(line) for line in _summary(pipeline)]
    return Group(live_table(f"{namespace}/{pipeline.key.name}", pipeline.status, pods), *lines)


def _summary(pipeline: Pipeline) -> Iterable[str]:
    status = pipeline.status
    if status.interruptions:
        yield interruptions_line(status)
    if status.gate:
        yield gate_line(status.gate)
    if status.model:
        yield f"model {status.model.uri}  {status.model.digest}"
        if status.model.endpoint:
            yield f"endpoint {status.model.endpoint}"
    yield ready_message(status) or "not yet reconciled by the operator"
