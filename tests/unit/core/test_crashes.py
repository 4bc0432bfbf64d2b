"""The operator may be killed, and its cluster may refuse, before and after everything it asks for."""

import contextlib
import itertools
import json
from collections.abc import Callable
from functools import partial

import pytest
from support.scenario import Scenario, done_now

from finetune_operator.errors import ClusterError
from finetune_operator.reconcile import reconcile

REQUESTS = ("read", "observe", "write_status", "apply", "announce")


class Killed(BaseException):
    """The operator's process is gone."""


class Trouble:
    """Raises once, at the n-th moment from now on."""

    def __init__(self, moment: int = 0, error: type[BaseException] = Killed) -> None:
        self.left, self.error = moment, error
        self.moments: list[str] = []

    def __call__(self, moment: str) -> None:
        self.moments.append(moment)
        self.left -= 1
        if self.left == 0:
            raise self.error(moment)

    def endure(self, look: Callable[[], None]) -> None:
        """Look, and once more where that was ended by trouble."""
        try:
            look()
        except (Killed, ClusterError):
            look()


class TroubleAfterTrouble(Trouble):
    """Ends every look at its first moment, the next at its second, and so on until one gets through."""

    def endure(self, look: Callable[[], None]) -> None:
        for moment in itertools.count(1):
            self.left = moment
            with contextlib.suppress(Killed):
                look()
                if self.left > 0:
                    return


def a_story(trouble: Trouble) -> Scenario:
    """A whole pipeline with an eviction, a failure, a suspension and an edit while training runs."""
    scenario = Scenario()
    scenario.cluster.inject_fault = trouble
    scenario.reconcile = partial(trouble.endure, scenario.reconcile)
    scenario.run("prepare")
    scenario.cluster.evict(scenario.start("train"), step=70, saved=70)
    job = scenario.start("train")
    scenario.cluster.progress(job, step=90, start_step=70, step_seconds=2.0)
    scenario.reconcile_until_stable()
    scenario.lose_node(job)
    job = scenario.start("train")
    scenario.cluster.progress(job, step=75, start_step=70, step_seconds=2.0)
    scenario.edit(train={"resources": {"memory": "32Gi"}})
    scenario.cluster.evict(job, why=None)
    scenario.reconcile_until_stable().edit(suspend=True)
    scenario.cluster.evict(scenario.attempt("train").job, why=None)
    scenario.reconcile_until_stable().edit(suspend=False)
    scenario.cluster.fail(scenario.start("train"), 70)
    return scenario.reconcile_until_stable().after(10).finish()


def the_end(scenario: Scenario) -> str:
    """All that is left in the end, without when."""
    status = scenario.status.model_dump(mode="json", exclude_none=True)
    return json.dumps([scenario.cluster.applied, status], sort_keys=True)


@pytest.fixture(scope="module")
def undisturbed() -> tuple[Scenario, list[str]]:
    """The story's end, and the names of all its moments."""
    nothing = Trouble()
    return a_story(nothing), nothing.moments


def same_end(scenario: Scenario, undisturbed: Scenario) -> bool:
    told = scenario.cluster.emitted
    assert len(told) == len(set(told)), "an event was announced twice"
    assert set(told) <= set(undisturbed.cluster.emitted)
    return the_end(scenario) == the_end(undisturbed)


def test_an_operator_that_is_killed_in_every_look_at_every_moment_comes_to_the_same_end(undisturbed):
    trouble = TroubleAfterTrouble()
    assert same_end(a_story(trouble), undisturbed[0])
    assert {f"{when} {what}" for what in REQUESTS for when in ("before", "after")} == set(trouble.moments)


def test_a_single_trouble_changes_nothing_about_the_end(undisturbed):
    scenario, moments = undisturbed
    for moment in range(1, len(moments), 41):  # coprime with the moments of a look, so that all kinds are among them
        error = Killed if moment % 2 else ClusterError
        assert same_end(a_story(Trouble(moment, error)), scenario), f"{error.__name__} {moments[moment - 1]}"


def test_what_was_written_down_is_announced_also_when_what_follows_is_refused():
    scenario = Scenario()
    scenario.cluster.inject_fault = Trouble(7, ClusterError)
    with pytest.raises(ClusterError, match="before apply"):
        scenario.reconcile()
    assert scenario.events == ["AttemptStarted"]
    assert scenario.reconcile_until_stable().events == ["AttemptStarted"]


def test_nothing_is_done_or_said_before_it_is_written_down():
    scenario = Scenario()
    scenario.cluster.inject_fault = Trouble(5, ClusterError)
    with pytest.raises(ClusterError, match="before write_status"):
        scenario.reconcile()
    assert scenario.cluster.applied == []
    assert scenario.cluster.emitted == []
    assert scenario.status.stages == {}


def test_a_status_written_by_somebody_else_in_between_is_not_overwritten():
    scenario = Scenario()
    edits = iter([scenario.spec.model_copy(update={"seed": 7})])

    def somebody(moment: str) -> None:
        if moment == "before write_status" and (spec := next(edits, None)):
            scenario.cluster.edit(scenario.key, spec)

    scenario.cluster.inject_fault = somebody
    with pytest.raises(ClusterError, match="changed since"):
        done_now(reconcile(scenario.key, scenario.cluster, scenario.settings, scenario.cluster.now))
    assert scenario.cluster.applied == []
    assert scenario.reconcile_until_stable().status.observed_generation == 2


def test_what_is_left_of_two_actions_is_done_by_the_next_operator():
    scenario = Scenario().run("prepare")
    job = scenario.start("train")
    scenario.cluster.edit(scenario.key, scenario.spec.model_copy(update={"seed": 7}))
    deaths = iter(["after apply"])

    def between_the_two(moment: str) -> None:
        if moment == "after apply" and next(deaths, None):
            raise Killed

    scenario.cluster.inject_fault = between_the_two
    with pytest.raises(Killed):
        scenario.reconcile()
    assert scenario.created_jobs[-1] == "prepare-a2"
    assert not scenario.cluster.jobs[job].asked_to_stop
    scenario.reconcile_until_stable()
    assert scenario.cluster.jobs[job].asked_to_stop
    assert scenario.created_jobs[-1] == "prepare-a2"
