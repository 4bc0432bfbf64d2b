"""The turn of each pipeline on a claim: at most one pipeline at a time writes to it. Pure."""

from finetune_operator.api.conditions import Reason
from finetune_operator.api.spec import STAGES
from finetune_operator.core.observation import Blocker, ClaimUser, ObservedWorkspace

# A server reads the published model, so it may run beside a stage that writes to the claim.
WRITING_STAGES = frozenset(kind.name for kind in STAGES if not kind.runs_server)
"""Stages that write to the claim."""
WORKSPACE = "workspace"
"""Field of the spec, and the subject of a refusal to create the claim."""


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
