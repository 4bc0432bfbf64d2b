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
        raise UsageError("-A lists all pipelines; to see one, name its namespace with -n")
    if arguments.watch and (arguments.json or not arguments.name):
        raise UsageError("-w shows one pipeline again and again: give its name, and no --json")
    console = Console(highlight=False, soft_wrap=True)
    async with connect(arguments) as reach:
        if not reach.name:
            return await _list(reach, arguments, console)
        if arguments.watch:
            return await _watch(reach, console)
        if arguments.json:
            print(json.dumps(_whole(await reach.found()), indent=1))
        else:
            pipeline = await reach.pipeline()
            console.print(_tree(pipeline, await list_pods(reach)))
    return 0


def _whole(found: Object) -> Object:
    meta = {name: value for name, value in found["metadata"].items() if name != "managedFields"}
    return {**found, "metadata": meta}


async def _list(reach: ClusterSession, arguments: argparse.Namespace, console: Console) -> int:
    namespace = None if arguments.all_namespaces else reach.context.namespace
    found = [_whole(one) async for one in reach.api.list(paths.pipelines(namespace))]
    if arguments.json:
        print(json.dumps({"apiVersion": API_VERSION, "kind": f"{KIND}List", "items": found}, indent=1))
        return 0
    if not found:
        console.print(f"no pipelines in {f'the namespace {namespace}' if namespace else 'any namespace'}")
        return 0
    lead = () if namespace else ("NAMESPACE",)
    rows = [(*lead, *COLUMNS), *((one["metadata"]["namespace"],)[: len(lead)] + _row(one) for one in found)]
    for line in _aligned(rows):
        console.print(line, markup=False)
    return 0


def _row(found: Object) -> tuple[str, ...]:
    status = found.get("status") or {}
    reason = next((one["reason"] for one in status.get("conditions") or [] if one["type"] == READY), "")
    shown = (status.get("phase"), status.get("stage"), status.get("progress"), status.get("attempt"), reason)
    return (found["metadata"]["name"], *(str(value or "") for value in shown))


def _aligned(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


async def _watch(reach: ClusterSession, console: Console) -> int:
    """Draw it in place on a terminal, and anywhere else anew whenever it has changed."""
    pipeline, shown = await reach.pipeline(), ""
    in_place = Live(console=console, auto_refresh=False, vertical_overflow="visible")
    with in_place if console.is_terminal else nullcontext() as live:
        while True:
            tree = _tree(pipeline, await with_retries(lambda: list_pods(reach)))
            if live:
                live.update(tree, refresh=True)
            elif (drawn := _drawn(tree)) != shown:
                print(shown := drawn, flush=True)
            if has_finished(pipeline):
                return exit_code(pipeline.status)
            await asyncio.sleep(POLL_SECONDS)
            pipeline = await refresh(reach)


def _drawn(tree: RenderableType) -> str:
    console = Console(highlight=False, soft_wrap=True)
    with console.capture() as captured:
        console.print(tree)
    return captured.get()


def _tree(pipeline: Pipeline, books: ResourceCache) -> RenderableType:
    """Draw stages, attempts and pods, and below them what came of it."""
    namespace = pipeline.key.namespace

    def pods(attempt: AttemptStatus) -> Sequence[str]:
        pod = books.pods.get((namespace, attempt.job))
        if pod is None:
            return (f"job {attempt.job}: no pod",)
        return (f"pod {pod.name} on {pod.node or 'no node yet'}: {pod.phase}",)

    lines = [Text(line) for line in _conclusion(pipeline)]
    return Group(live_table(f"{namespace}/{pipeline.key.name}", pipeline.status, pods), *lines)


def _conclusion(pipeline: Pipeline) -> Iterable[str]:
    status = pipeline.status
    if status.interruptions:
        yield interruptions_line(status)
    if status.gate:
        yield gate_line(status.gate)
    if status.model:
        yield f"model {status.model.uri}  {status.model.digest}"
        if status.model.endpoint:
            yield f"endpoint {status.model.endpoint}"
    yield ready_message(status) or "the operator has not looked at it yet"
