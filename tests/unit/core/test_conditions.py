"""What the status says to machines: conditions, generations, times, and what kstatus makes of them; and events."""

from datetime import timedelta

import pytest
from support.scenario import START, World, a_pipeline, kstatus, scores


def kinds(world: World) -> set[str]:
    return {condition.type for condition in world.status.conditions} & {"Ready", "Reconciling", "Stalled", "Finished"}


def at_work() -> World:
    world = World()
    world.start("prepare")
    return world


def between_attempts() -> World:
    world = World()
    world.cluster.fail(world.start("prepare"), 70)
    return world.settle()


def failed() -> World:
    world = World()
    world.cluster.fail(world.start("prepare"), 65)
    return world.settle()


def cancelled() -> World:
    world = at_work().cancel("now")
    world.cluster.evict(world.attempt("prepare").job, why=None)
    return world.settle()


def below() -> World:
    return World().finish(evaluate=scores(0.1))


WORKING = {"Ready", "Reconciling", "Finished"}
SITUATIONS = {
    "waiting for a node": (lambda: World().settle(), WORKING, "False", "False", "InProgress"),
    "at work": (at_work, WORKING, "False", "False", "InProgress"),
    "between two attempts": (between_attempts, WORKING, "False", "False", "InProgress"),
    "suspended": (
        lambda: World(a_pipeline(suspend=True)).settle(),
        {"Ready", "Finished"},
        "False",
        "False",
        "InProgress",
    ),
    "succeeded": (lambda: World().finish(), {"Ready", "Finished"}, "True", "True", "Current"),
    "below the gate": (below, {"Ready", "Finished"}, "False", "True", "InProgress"),
    "failed": (failed, {"Ready", "Stalled", "Finished"}, "False", "True", "Failed"),
    "cancelled": (cancelled, {"Ready", "Stalled", "Finished"}, "False", "True", "Failed"),
}


@pytest.mark.parametrize(
    ("situation", "present", "ready", "finished", "seen_as"), SITUATIONS.values(), ids=SITUATIONS.keys()
)
def test_conditions_say_how_it_stands(situation, present, ready, finished, seen_as):
    world = situation()
    assert kinds(world) == present
    assert world.condition("Ready")[0] == ready
    assert world.condition("Finished")[0] == finished
    assert all(c.status == "True" for c in world.status.conditions if c.type in {"Reconciling", "Stalled"})
    assert {c.observed_generation for c in world.status.conditions} == {world.generation}
    assert kstatus(world.generation, world.status) == seen_as


def test_an_edit_is_in_progress_until_it_has_been_seen():
    world = World().finish()
    world.cluster.edit(world.key, a_pipeline(seed=7))
    assert kstatus(world.generation, world.status) == "InProgress"
    world.settle()
    assert world.status.observed_generation == world.generation == 2
    assert {c.observed_generation for c in world.status.conditions} == {2}


def test_a_condition_keeps_the_time_of_its_last_change():
    world = World()
    world.look()
    world.after(500).finish()
    times = {c.type: c.last_transition_time - START for c in world.status.conditions}
    assert times["Prepared"] == timedelta(seconds=560)
    assert times["Deployed"] == times["Ready"] == times["Finished"] == timedelta(seconds=800)
    world.after(500).edit(evaluate={"gate": {"threshold": 0.1}})
    assert {c.type: c.last_transition_time - START for c in world.status.conditions} == times


def test_a_finished_pipeline_says_since_when_and_one_that_goes_on_does_not():
    world = World().finish()
    assert (world.status.finished_at - world.status.started_at) == timedelta(seconds=300)
    world.after(100).edit(seed=7)
    assert world.status.finished_at is None
    assert world.finish().status.finished_at == world.cluster.now


def test_every_stage_has_a_condition_in_the_past_tense():
    world = World(a_pipeline(deploy=None)).run("prepare").run("train")
    assert [world.condition(kind) for kind in ("Prepared", "Trained", "Evaluated", "Pushed", "Deployed")] == [
        ("True", "StageSucceeded"),
        ("True", "StageSucceeded"),
        ("Unknown", "Progressing"),
        ("Unknown", "DependencyNotReady"),
        ("False", "NotRequested"),
    ]


def test_events_tell_the_story_once():
    world = World(a_pipeline(push=None, deploy=None))
    world.cluster.fail(world.start("prepare"), 70, "no space")
    world.settle().after(10).run("prepare")
    world.lose_node(world.start("train"))
    world.settle().finish()
    assert world.events == [
        "AttemptStarted",
        "AttemptFailed",
        "AttemptStarted",
        "StageSucceeded",
        "AttemptStarted",
        "AttemptInterrupted",
        "AttemptStarted",
        "StageSucceeded",
        "AttemptStarted",
        "StageSucceeded",
        "PipelineSucceeded",
    ]
    assert len(set(world.cluster.announced)) == len(world.cluster.announced)
    assert world.cluster.announced[1][1].message == "prepare attempt 1: no space"


@pytest.mark.parametrize(
    ("situation", "last"),
    [(failed, "PipelineFailed"), (cancelled, "PipelineCancelled"), (below, "PipelineBelowThreshold")],
)
def test_the_last_event_says_how_it_ended(situation, last):
    assert situation().events[-1] == last


def test_another_end_without_any_work_is_told_too():
    world = World(a_pipeline(evaluate={"gate": {"metric": "f1"}}, push=None, deploy=None)).finish()
    assert world.events[-1] == "PipelineFailed"
    world.edit(evaluate={"gate": {"metric": "acc"}})
    assert world.events[-1] == "PipelineSucceeded"


def test_a_pipeline_that_fails_again_after_a_retry_says_so_again():
    world = failed().retry("1")
    world.cluster.fail(world.start("prepare"), 65)
    assert world.settle().events.count("PipelineFailed") == 2
