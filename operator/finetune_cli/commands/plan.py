"""`finetune plan`: print what `finetune run`, or applying the manifest to a cluster, would do, and why."""

import argparse
import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from finetune_cli.arguments import (
    NAME_OR_FILE,
    add_cluster_arguments,
    add_local_arguments,
    add_set,
    claims,
    manifest_path,
    overrides,
    run_on_cluster,
    targets_cluster,
    workdir_for,
)
from finetune_cli.commands import Commands
from finetune_cli.forecast.counts import (
    DataCounts,
    count_lines,
    is_model_here,
    is_small,
)
from finetune_cli.forecast.forecast import (
    FindKeptWork,
    KeptWork,
    PipelineForecast,
    forecast,
)
from finetune_cli.forecast.learning_rate import learning_rate_line
from finetune_cli.forecast.memory import memory_lines
from finetune_cli.forecast.placement import placement_lines, read_placement
from finetune_cli.forecast.training_time import time_line
from finetune_cli.local.run import LocalRun
from finetune_cli.manifest.fields import without_effect
from finetune_cli.manifest.manifest import Manifest, read
from finetune_cli.output.forecast_lines import PlanReport, print_plan
from finetune_cli.output.working import working
from finetune_operator.api.placement import PlacementDefaults
from finetune_operator.core.assessment import StageAssessment
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.local.job_folder import read_model
from finetune_trainer.contract import PrepareResult
from finetune_trainer.contract.preview import PreviewReport

DESCRIPTION = """\
Print for every stage whether it would run, resume, be reused or be skipped, and why; then records, rows, tokens and
steps, the memory and the time of the training as far as they are known, and the sources that were not looked at. Small
data on this machine is read for it. Nothing is written. FILE, or the NAME of a run on this machine: what `finetune run`
would do. FILE with -n or --context: what applying the manifest to that cluster would do; the API server checks it in a
dry run. NAME of a pipeline on a cluster: what remains to be done.
"""

LENGTHS = ("epochs", "maxSteps")
"""Fields of spec.train that decide how many steps a training has."""
ADAPTER_CONFIG = "adapter_config.json"
"""File of an adapter in the format of PEFT; a training of all weights has none."""
# Such files alone would make a forecast say "resume" although the attempt begins anew.
NO_WORK = frozenset({"config.json", "server.log"})
"""Files that an attempt writes before it has done any work to resume from."""


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "plan", help="show what would run, and why", description=DESCRIPTION
    )
    parser.add_argument("name", metavar="NAME|FILE", help=NAME_OR_FILE)
    add_set(parser)
    add_local_arguments(parser)
    add_cluster_arguments(parser)
    text = "the operator's placement (values of its chart): show with it where the stages run, and the expected cost"
    parser.add_argument("--placement", metavar="FILE", help=text)
    parser.add_argument(
        "--json", action="store_true", help="print the forecast as JSON"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the forecast."""
    if targets_cluster(arguments.name, arguments):
        return run_on_cluster("apply_forecast", arguments)
    manifest = read(manifest_path(arguments.name), overrides(arguments))
    workdir = workdir_for(manifest, arguments.workdir)
    defaults = None
    if arguments.placement:
        defaults = read_placement(arguments.placement)
    folders = claims(arguments.claim)
    with working("looking at the data and the model …"):
        report = plan(manifest, workdir, folders, defaults)
    print_plan(report, as_json=arguments.json)
    return 0


def plan(
    manifest: Manifest,
    workdir: Path,
    folders: Mapping[str, Path],
    defaults: PlacementDefaults | None = None,
) -> PlanReport:
    """Return what a run in the work folder would do; `folders` replace claims, by their names."""
    with LocalRun.read_only(manifest, workdir, folders) as local_run:
        not_looked_at = local_run.check()
        before = local_run.cluster.pipeline_file.read()
        planned = asyncio.run(_forecast(local_run, before))
        prepared = _prepared(planned, local_run)
        previewed = _preview(local_run, prepared)
    data: DataCounts | None = prepared
    if data is None and previewed is not None:
        data = previewed.counts
    estimates = list(memory_lines(manifest.spec, previewed, defaults))
    time = time_line(manifest.spec, before, data.train_rows if data else None)
    if time:
        estimates.append(time)
    longer = _train_longer(planned, before, local_run)
    warnings = (learning_rate_line(manifest.spec), longer)
    notes = [*planned.notes, *_notes(previewed), *filter(None, warnings)]
    now = datetime.now(UTC)  # noqa: TID251  an edge
    return PlanReport(
        planned.stages,
        notes=notes,
        placement=list(placement_lines(planned, manifest.spec, defaults, now)),
        counts=count_lines(manifest.spec, data, local_run.environment),
        estimates=estimates,
        not_looked_at=not_looked_at,
        without_effect=without_effect(manifest.spec),
    )


def _preview(
    local_run: LocalRun, prepared: PrepareResult | None
) -> PreviewReport | None:
    """Return a preview of the model, and of data that prepare has not read; None if the model is not here.

    The data is read if it is small and on this machine.
    """
    spec = local_run.manifest.spec
    if not is_model_here(spec, local_run.environment):
        return None
    reads = prepared is None and is_small(spec, local_run.environment)
    return local_run.preview(records=reads, memory=True)


def _train_longer(
    planned: PipelineForecast, before: Pipeline | None, local_run: LocalRun
) -> str:
    """Return how to train longer from the finished adapter, if an edit asks for more steps; else an empty text."""
    [stage] = [stage for stage in planned.stages if stage.stage == "train"]
    is_longer = any(f"spec.train.{name}:" in stage.reason for name in LENGTHS)
    if stage.action != "run" or not is_longer:
        return ""
    text = "train: another number of steps is another training, which begins at step 0"
    trained = before.status.stages.get("train") if before else None
    if trained is None:
        return text
    adapter = local_run.environment.stage_dir("train", trained.identity) / "output"
    if not (adapter / ADAPTER_CONFIG).is_file():
        return text
    fix = f"to train on from the adapter, set train.startFrom.uri to file://{adapter}"
    return f"{text}; {fix} (docs/guides/train.md, Train longer)"


def _notes(report: PreviewReport | None) -> list[str]:
    """Return what a preview has to say."""
    if report is None:
        return []
    problems = [f"{problem.field}: {problem.message}" for problem in report.problems]
    return [*problems, *report.notes]


def _prepared(planned: PipelineForecast, local_run: LocalRun) -> PrepareResult | None:
    """Return the result of prepare that would be reused, from the status or from the workspace; None if it runs."""
    stage = planned.assessment.stages["prepare"]
    if isinstance(stage.status.result, PrepareResult):
        return stage.status.result
    folder = local_run.environment.stage_dir("prepare", stage.status.identity)
    return read_model(folder / "result.json", PrepareResult)


async def _forecast(local_run: LocalRun, before: Pipeline | None) -> PipelineForecast:
    manifest = local_run.manifest
    file = local_run.cluster.pipeline_file
    # The first run has no UID yet; the forecast shows none.
    after = file.edited(manifest.spec, manifest.annotations) or Pipeline(
        local_run.key, "0" * 8, 1, manifest.spec
    )
    observed = await local_run.cluster.observe(after)
    now = datetime.now(UTC)  # noqa: TID251  an edge
    workspace = local_run.cluster.folders.workspace(after)
    return forecast(before, after, observed, now, _find_in_workspace(workspace))


def _find_in_workspace(workspace: Path) -> FindKeptWork:
    def find(name: str, stage: StageAssessment) -> KeptWork | None:
        folder = workspace / name / stage.status.identity
        if (folder / "result.json").is_file():
            return KeptWork("reuse", "its result is in the workspace")
        if _has_work(folder):
            return KeptWork("resume", "resumes from the work of an earlier attempt")
        return None

    return find


def _has_work(folder: Path) -> bool:
    """Return whether the folder holds work of an earlier attempt."""
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        # Files and folders whose names begin with a dot are unfinished: the trainer renames them when they are whole.
        is_unfinished = any(part.startswith(".") for part in parts)
        if path.name not in NO_WORK and not is_unfinished and path.is_file():
            return True
    return False
