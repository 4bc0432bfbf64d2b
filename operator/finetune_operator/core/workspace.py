"""The turn of each pipeline on a claim: at most one pipeline at a time writes to it. Pure."""

from collections.abc import Collection, Mapping

from finetune_operator.api.conditions import Reason
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import GateStatus, StageStatus
from finetune_operator.core.observation import (
    Blocker,
    ClaimUser,
    JobState,
    ObservedJob,
    ObservedWorkspace,
)
from finetune_operator.core.pipeline import Pipeline
from finetune_trainer.contract import Pruning

# A server reads the published model, so it may run beside a stage that writes to the claim.
WRITING_STAGES = frozenset(kind.name for kind in STAGES if not kind.runs_server)
"""Stages that write to the claim."""
WORKSPACE = "workspace"
"""Field of the spec, and the subject of a refusal to create the claim."""


def lost_results(
    pipeline: Pipeline,
    workspace: ObservedWorkspace,
    statuses: Mapping[str, StageStatus],
    gates: tuple[GateStatus, ...],
    failed: Collection[str],
) -> frozenset[str]:
    """Return the stages that must run again, given that the claim with their results is gone or is being deleted.

    Users delete the claims of finished pipelines to save storage. A pipeline that needs no file of its claim stays as
    it is, unless the operator has advised to delete the claim, or the user retries it.
    """
    specs = pipeline.spec.stages()
    writers = WRITING_STAGES & specs.keys()
    # The claim exists as long as a Job runs, so that the user can still copy files from it.
    is_held = any(statuses[name].running_attempt for name in writers)
    if is_held:
        return frozenset()
    results = frozenset(name for name in writers if statuses[name].result)
    if workspace.outdated or pipeline.status.workspace_outdated:
        return results | writers.intersection(failed)
    if failed:
        return frozenset()
    waits = _waits_for_files(pipeline, writers - results, gates)
    return results if waits or _repeats_all(pipeline, statuses) else frozenset()


def _waits_for_files(
    pipeline: Pipeline, unfinished: Collection[str], gates: tuple[GateStatus, ...]
) -> bool:
    """Return whether one of these stages is still to run."""
    # A gate without a score has failed the pipeline.
    if not all(gate.measured for gate in gates):
        return False
    specs = pipeline.spec.stages()
    return any(not specs[name].skip_reason(gates) for name in unfinished)


def _repeats_all(pipeline: Pipeline, statuses: Mapping[str, StageStatus]) -> bool:
    """Return whether the user retries a pipeline of which nothing has failed."""
    done = all(statuses[name].result for name in pipeline.spec.stages())
    return pipeline.retry is not None and done


def pruning_of(
    pipeline: Pipeline,
    stage: str,
    statuses: Mapping[str, StageStatus],
    workspace: ObservedWorkspace,
) -> Pruning:
    """Return the results that the process of a stage leaves in the workspace when it starts.

    Only the stages that are done and the stage itself are named: the identities of later stages may still change to
    earlier ones, whose results must then be there.
    """
    named = [
        f"{name}/{status.identity}"
        for name, status in statuses.items()
        if name == stage or (name in WRITING_STAGES and status.result)
    ]
    # An operator's own claim may be the existing claim of other pipelines.
    shared = bool(pipeline.spec.workspace.existing_claim or workspace.users)
    keep = (*named, *sorted(workspace.read_results))
    return Pruning(keep, pipeline.spec.workspace.unused_kept, shared)


def has_lost_claim(workspace: ObservedWorkspace, job: ObservedJob | None) -> bool:
    """Return whether no pod of the Job can start, because the claim is gone or goes. A pod with a node keeps it."""
    if job is None or job.state is not JobState.WAITING or job.node:
        return False
    return workspace.gone or workspace.deleting


def start_blocker(workspace: ObservedWorkspace) -> Blocker | None:
    """Return why no stage of the pipeline may start an attempt on its claim; None if it may."""
    return workspace.blocker or _in_use(workspace, _users_before_start(workspace))


def create_blocker(workspace: ObservedWorkspace) -> Blocker | None:
    """Return why the Job of an attempt that is recorded already may not be created yet; None if it may.

    Two leaders may have recorded attempts of two pipelines at once. The older pipeline then goes first.
    """
    older = _older_users(workspace)
    rivals = [user for user in older if user.recorded]
    return workspace.blocker or _in_use(workspace, [*_writers(workspace), *rivals])


def users_before(workspace: ObservedWorkspace) -> int:
    """Return how many pipelines use the claim or go first."""
    return len({user.name for user in _users_before_start(workspace)})


def _users_before_start(workspace: ObservedWorkspace) -> list[ClaimUser]:
    """Return the users for which the pipeline waits, the first to name first."""
    # The Job of a recorded attempt may appear at any time.
    recorded = [user for user in workspace.users if user.recorded]
    # Without an order of age, two waiting pipelines would start at the same moment.
    waiting = [user for user in _older_users(workspace) if not user.finished]
    return [*_writers(workspace), *recorded, *waiting]


def _writers(workspace: ObservedWorkspace) -> list[ClaimUser]:
    return [user for user in workspace.users if user.writing]


def _older_users(workspace: ObservedWorkspace) -> list[ClaimUser]:
    return [user for user in workspace.users if user.seniority < workspace.seniority]


def _in_use(workspace: ObservedWorkspace, users: list[ClaimUser]) -> Blocker | None:
    if not users:
        return None
    user = users[0]
    state = "still has a running Job" if user.writing else "has not finished"
    return Blocker(
        Reason.WORKSPACE_IN_USE,
        f"the claim {workspace.claim} is the workspace of the pipeline {user.name}, which {state}: "
        "wait for it, or use another claim",
    )
