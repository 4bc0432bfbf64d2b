"""`finetune plan`: print what `finetune run`, or applying the manifest to a cluster, would do, and why."""

import argparse
import asyncio
import tempfile
from datetime import UTC, datetime
from pathlib import Path

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
from finetune_cli.display import print_forecast, print_forecast_json
from finetune_cli.forecast import FindKeptWork, Forecast, KeptWork, forecast, without_effect
from finetune_cli.local.run import LocalRun, with_spec
from finetune_cli.manifest.manifest import read
from finetune_operator.core.assess import StageAssessment
from finetune_operator.core.pipeline import Pipeline

DESCRIPTION = """\
Print for every stage whether it would run, resume, be reused or be skipped, and why. Nothing is written or started.
FILE: what `finetune run FILE` would do. FILE with -n or --context: what applying the manifest to that cluster would do;
the API server checks it in a dry run. NAME: what remains to be done for a pipeline on a cluster.
"""

NO_WORK = frozenset({"config.json", "server.log"})
"""Files that an attempt writes before it has done any work to resume from."""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("plan", help="show what would run, and why", description=DESCRIPTION)
    parser.add_argument("name", metavar="NAME|FILE", help=NAME_OR_FILE)
    add_local_arguments(parser)
    add_cluster_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the forecast as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the forecast."""
    if targets_cluster(arguments.name, arguments):
        return run_on_cluster("plan", arguments)
    manifest = read(Path(arguments.name))
    workdir = workdir_for(manifest, arguments.workdir)
    with tempfile.TemporaryDirectory() as links:
        local_run = LocalRun.read_only(manifest, workdir, Path(links))
        linked = {link.name: link.resolve() for link in (workdir / "claims").glob("*") if link.is_dir()}
        local_run.cluster.folders.link_claims(linked | claims(arguments.claim))
        local_run.check_claims()
        local_run.check_sources()
        stages = asyncio.run(_forecast(local_run))
    unused = without_effect(manifest.spec)
    if arguments.json:
        print_forecast_json(stages, withoutEffectHere=unused)
        return 0
    console = Console(highlight=False, soft_wrap=True)
    print_forecast(stages, console)
    if unused:
        console.print(f"without effect on this machine: {', '.join(unused)}", style="dim", markup=False)
    return 0


async def _forecast(local_run: LocalRun) -> list[Forecast]:
    manifest = local_run.manifest
    before = local_run.cluster.pipeline_file.read()
    after = with_spec(before, manifest) if before else Pipeline(local_run.key, "0" * 8, 1, manifest.spec)
    observed = await local_run.cluster.observe(after)
    now = datetime.now(UTC)  # noqa: TID251  an edge
    return forecast(before, after, observed, now, _find_in_workspace(local_run.cluster.folders.workspace(after)))


def _find_in_workspace(workspace: Path) -> FindKeptWork:
    def find(name: str, stage: StageAssessment) -> KeptWork | None:
        folder = workspace / name / stage.status.identity
        if (folder / "result.json").is_file():
            return KeptWork("reuse", "its result is in the workspace")
        return KeptWork("resume", "resumes from the work of an earlier attempt") if _has_work(folder) else None

    return find


def _has_work(folder: Path) -> bool:
    """Whether the folder holds work of an earlier attempt; names that begin with a dot are unfinished files."""
    files = (path.relative_to(folder).parts for path in folder.rglob("*") if path.is_file())
    return any(parts[-1] not in NO_WORK and not any(part.startswith(".") for part in parts) for parts in files)
