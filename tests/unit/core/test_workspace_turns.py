"""Whose turn a claim is, from the other pipelines that use it."""

import pytest

from finetune_operator.api.conditions import Reason
from finetune_operator.core.observation import Blocker, ClaimUser, ObservedWorkspace
from finetune_operator.core.workspace import create_blocker, start_blocker

OWN = ("2030", "m")
OLDER = ("2029", "z")
YOUNGER = ("2031", "a")

USERS = {
    "no other": ((), True, True),
    "older that waits": (
        (ClaimUser("x", writing=False, seniority=OLDER),),
        False,
        True,
    ),
    "older that finished": (
        (ClaimUser("x", writing=False, finished=True, seniority=OLDER),),
        True,
        True,
    ),
    "younger that waits": (
        (ClaimUser("x", writing=False, seniority=YOUNGER),),
        True,
        True,
    ),
    "older with an attempt": (
        (ClaimUser("x", writing=False, recorded=True, seniority=OLDER),),
        False,
        False,
    ),
    "younger with an attempt": (
        (ClaimUser("x", writing=False, recorded=True, seniority=YOUNGER),),
        False,
        True,
    ),
    "younger that writes": (
        (ClaimUser("x", writing=True, recorded=True, seniority=YOUNGER),),
        False,
        False,
    ),
    "finished that writes": (
        (ClaimUser("x", writing=True, finished=True, seniority=YOUNGER),),
        False,
        False,
    ),
    "Job of a deleted pipeline": ((ClaimUser("x", writing=True),), False, False),
    "same age, smaller uid": (
        (ClaimUser("x", writing=False, seniority=("2030", "a")),),
        False,
        True,
    ),
    "same age, larger uid": (
        (ClaimUser("x", writing=False, seniority=("2030", "z")),),
        True,
        True,
    ),
    "second of two": (
        (
            ClaimUser("x", writing=False, finished=True, seniority=OLDER),
            ClaimUser("y", writing=False, recorded=True, seniority=YOUNGER),
        ),
        False,
        True,
    ),
}


@pytest.mark.parametrize(
    ("users", "may_start", "may_create"), USERS.values(), ids=USERS
)
def test_turn_depends_on_the_other_users(users, may_start, may_create):
    workspace = ObservedWorkspace(seniority=OWN, users=users)
    assert (start_blocker(workspace) is None, create_blocker(workspace) is None) == (
        may_start,
        may_create,
    )


def test_of_two_recorded_pipelines_exactly_one_may_create():
    pipelines = {"first": OLDER, "second": OWN, "third": YOUNGER}
    may_create = []
    for name, seniority in pipelines.items():
        users = (
            ClaimUser(user, writing=False, recorded=True, seniority=age)
            for user, age in pipelines.items()
        )
        others = tuple(user for user in users if user.name != name)
        if create_blocker(ObservedWorkspace(seniority=seniority, users=others)) is None:
            may_create.append(name)
    assert may_create == ["first"]


def test_unusable_claim_comes_before_the_turn():
    blocker = Blocker(Reason.VOLUME_NOT_READY, "no such claim")
    workspace = ObservedWorkspace(
        blocker=blocker, users=(ClaimUser("x", writing=True),)
    )
    assert start_blocker(workspace) == create_blocker(workspace) == blocker


@pytest.mark.parametrize(
    ("writing", "text"),
    [(True, "still has a running Job"), (False, "has not finished")],
)
def test_message_names_the_other_pipeline(writing, text):
    workspace = ObservedWorkspace(
        seniority=OWN, users=(ClaimUser("x", writing=writing, seniority=OLDER),)
    )
    blocker = start_blocker(workspace)
    assert blocker
    assert blocker.reason is Reason.WORKSPACE_IN_USE
    assert f"the workspace of the pipeline x, which {text}" in blocker.message
