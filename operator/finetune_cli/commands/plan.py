"""`finetune plan`: what `finetune run`, or applying the manifest to a cluster, would do, and why."""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from finetune_cli.arguments import (
    NAME_OR_FILE,
    add_cluster_arguments,
    add_local_arguments,
    claims,
    run_on_cluster,
    targets_cluster,
    workdir_for,
)
from finetune_cli.commands import Commands
from finetune_cli.forecast import FindKeptWork, Forecast, KeptWork, forecast, without_effect
from finetune_cli.local.run import LocalRun, with_spec
from finetune_cli.manifest.manifest import read
from finetune_operator.core.assess import StageAssessment
from finetune_operator.core.pipeline import Pipeline

DESCRIPTION = """\
Say for every stage whether it would be run, resumed, reused or skipped, and why. Nothing is written or started.
FILE: what `finetune run FILE` would do. FILE with -n or --context: what applying it to that cluster would do, which
the cluster is asked as well (a dry run). NAME: what is to be done of a pipeline on a cluster, as it is.
"""

STYLES = {"reuse": "green", "run": "cyan", "resume": "yellow", "skip": "dim", "stay": "red"}
NO_WORK = frozenset({"config.json", "server.log"})


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("plan", help="say what would run and why", description=DESCRIPTION)
    parser.add_argument("name", metavar="NAME|FILE", help=NAME_OR_FILE)
    add_local_arguments(parser)
    add_cluster_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the forecast."""
    if targets_cluster(arguments.name, arguments):
        return run_on_cluster("plan", arguments)
    manifest = read(Path(arguments.name))
    workdir = workdir_for(manifest, arguments.workdir)
    with tempfile.TemporaryDirectory() as links:
        laptop = LocalRun.read_only(manifest, workdir, Path(links))
        known = {link.name: link.resolve() for link in (workdir / "claims").glob("*") if link.is_dir()}
        laptop.cluster.folders.link_claims(known | claims(arguments.claim))
        laptop.check_claims()
        laptop.check_sources()
        stages = asyncio.run(_forecast(laptop))
    unused = without_effect(manifest.spec)
    if arguments.json:
        print_json(stages, withoutEffectHere=unused)
        return 0
    console = Console(highlight=False, soft_wrap=True)
    show(stages, console)
    if unused:
        console.print(f"without effect on a laptop: {', '.join(unused)}", style="dim", markup=False)
    return 0


def print_json(stages: Sequence[Forecast], **more: Any) -> None:
    """Print it for programs."""
    print(json.dumps({"stages": [vars(stage) for stage in stages], **more}, indent=1))


def show(stages: Sequence[Forecast], console: Console) -> None:
    """Print a line for each stage."""
    for stage in stages:
        style = STYLES[stage.action]
        console.print(f"[{style}]{stage.action:<6}[/{style}] [bold]{stage.stage:<9}[/bold]", end=" ")
        console.print(stage.why, markup=False)


async def _forecast(laptop: LocalRun) -> list[Forecast]:
    before = laptop.cluster.pipeline_file.read()
    after = with_spec(before, laptop.manifest) if before else Pipeline(laptop.key, "0" * 8, 1, laptop.manifest.spec)
    observed = await laptop.cluster.observe(after)
    now = datetime.now(UTC)  # noqa: TID251  an edge
    return forecast(before, after, observed, now, _in_workspace(laptop.cluster.folders.workspace(after)))


def _in_workspace(workspace: Path) -> FindKeptWork:
    def keeps(name: str, stage: StageAssessment) -> KeptWork | None:
        folder = workspace / name / stage.status.identity
        if (folder / "result.json").is_file():
            return KeptWork("reuse", "its result is in the workspace")
        return KeptWork("resume", "goes on from what an earlier attempt has kept") if _has_work(folder) else None

    return keeps


def _has_work(folder: Path) -> bool:
    """Whether a file of an earlier attempt is there; what begins with a dot was never finished."""
    files = (path.relative_to(folder).parts for path in folder.rglob("*") if path.is_file())
    return any(parts[-1] not in NO_WORK and not any(part.startswith(".") for part in parts) for parts in files)
