"""Whose turn a claim is: at most one pipeline at a time writes to it. Pure."""

from finetune_operator.api.conditions import Reason
from finetune_operator.core.observation import Blocker, ClaimUser, ObservedWorkspace

WORKSPACE = "workspace"
"""Field of the spec, and the subject of a refusal to create the claim."""


def start_blocker(workspace: ObservedWorkspace) -> Blocker | None:
    """Return why no stage of the pipeline may start an attempt on its claim; None where it may."""
    return workspace.blocker or _in_use(workspace, _user_before_start(workspace))


def create_blocker(workspace: ObservedWorkspace) -> Blocker | None:
    """Return why the Job of an attempt that is recorded already may not be created yet; None where it may.

    Two leaders may have recorded attempts of two pipelines at once. The older pipeline then goes first.
    """
    rivals = (
        user for user in workspace.users if user.recorded and user.seniority < workspace.seniority
    )
    return workspace.blocker or _in_use(workspace, _writer(workspace) or next(rivals, None))


def _user_before_start(workspace: ObservedWorkspace) -> ClaimUser | None:
    if active := _writer(workspace) or next(
        (user for user in workspace.users if user.recorded), None
    ):
        return active
    waiting = (
        user
        for user in workspace.users
        if not user.finished and user.seniority < workspace.seniority
    )
    return next(waiting, None)


def _writer(workspace: ObservedWorkspace) -> ClaimUser | None:
    return next((user for user in workspace.users if user.writing), None)


def _in_use(workspace: ObservedWorkspace, user: ClaimUser | None) -> Blocker | None:
    if user is None:
        return None
    return Blocker(
        Reason.WORKSPACE_IN_USE,
        f"the claim {workspace.claim} is the workspace of the pipeline {user.name}, which "
        + ("still has a running Job" if user.writing else "has not finished")
        + ": wait for it, or use another claim",
    )
