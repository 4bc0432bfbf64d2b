"""Suspend, cancel, retry: what people ask for besides the spec."""

import pytest
from support.scenario import ORDER, World, a_pipeline, kstatus

from finetune_operator.api.status import Outcome


@pytest.mark.parametrize("stage", ORDER)
def test_suspending_stops_what_runs_and_resuming_starts_it_again(stage):
    world = World().run_before(stage)
    job = world.start(stage)
    world.edit(suspend=True)
    assert world.cluster.jobs[job].asked_to_stop
    assert (world.status.phase, world.condition("Reconciling")) == ("Suspended", ("True", "Suspended"))
    world.cluster.evict(job, step=5, saved=5, why=None)
    world.after(1000).settle()
    assert (world.attempt(stage).outcome, world.attempt(stage).reason) == (Outcome.STOPPED, "Suspended")
    assert (world.stage(stage).state, world.stage(stage).reason) == ("Pending", "Suspended")
    assert world.condition("Reconciling") is None
    assert world.condition("Finished") == ("False", "Suspended")
    world.edit(suspend=False)
    assert world.created[-1] == f"{stage}-a2"
    assert world.stage(stage).interruptions == 0
    assert world.finish().status.phase == "Succeeded"


def test_nothing_starts_between_two_stages_while_suspended():
    world = World()
    world.start("prepare")
    world.edit(suspend=True).complete("prepare")
    assert world.created == ["prepare-a1"]
    assert world.edit(suspend=False).created == ["prepare-a1", "train-a1"]


def test_a_pipeline_that_is_born_suspended_starts_nothing():
    world = World(a_pipeline(suspend=True)).settle()
    assert world.created == []
    assert world.status.phase == "Suspended"


def test_a_finished_pipeline_is_not_suspended():
    world = World().finish().edit(suspend=True)
    assert world.condition("Ready") == ("True", "AllStagesSucceeded")


def test_resuming_before_the_old_job_is_gone_waits_for_its_end():
    world = World()
    job = world.start("prepare")
    world.edit(suspend=True).edit(suspend=False)
    assert world.created == ["prepare-a1"]
    world.cluster.evict(job, why=None)
    assert world.settle().created == ["prepare-a1", "prepare-a2"]


def killed_before_acting(world: World) -> World:
    """Look once, but die when the status is written and nothing is done yet."""
    world.cluster.fault = lambda moment: 1 / 0 if moment == "before apply" else None
    with pytest.raises(ZeroDivisionError):
        world.look()
    world.cluster.fault = lambda moment: None
    return world


def test_a_stop_that_was_written_down_is_carried_out_even_if_it_is_not_wanted_any_more():
    world = World()
    job = world.start("prepare")
    world.cluster.edit(world.key, a_pipeline(suspend=True))
    killed_before_acting(world)
    assert not world.cluster.jobs[job].asked_to_stop
    world.edit(suspend=False)
    assert world.cluster.jobs[job].asked_to_stop
    world.cluster.evict(job, why=None)
    assert world.finish().status.phase == "Succeeded"


def test_a_job_that_was_never_made_needs_no_stopping():
    world = killed_before_acting(World())
    world.edit(suspend=True)
    assert world.cluster.jobs == {}
    assert world.attempt("prepare").outcome == Outcome.STOPPED
    assert world.edit(suspend=False).created == ["prepare-a2"]


@pytest.mark.parametrize("stage", ORDER)
def test_cancelling_stops_for_good(stage):
    world = World().run_before(stage)
    job = world.start(stage)
    world.cancel("now")
    assert world.cluster.jobs[job].asked_to_stop
    world.cluster.evict(job, why=None)
    world.after(1e6).settle()
    assert world.status.phase == "Cancelled"
    assert world.condition("Finished") == ("True", "Cancelled")
    assert kstatus(world.generation, world.status) == "Failed"
    assert world.created[-1] == f"{stage}-a1"
    world.retry("now")
    assert world.finish().status.phase == "Succeeded"


def test_a_cancelled_pipeline_stays_so_when_it_is_edited():
    world = World().settle().cancel("now")
    world.cluster.evict(world.attempt("prepare").job, why=None)
    world.settle().edit(train={"lora": {"rank": 4}})
    assert world.status.phase == "Cancelled"


def test_a_new_word_is_needed_to_cancel_or_retry_again():
    world = World().settle().cancel("1")
    world.cluster.evict(world.attempt("prepare").job, why=None)
    world.settle().retry("1")
    assert world.created[-1] == "prepare-a2"
    world.cancel("1").retry("1")
    assert world.status.cancelled is False
    assert not world.cluster.jobs[world.attempt("prepare").job].asked_to_stop
    world.cancel("2")
    assert world.status.cancelled is True


def test_cancelling_what_is_finished_changes_nothing():
    world = World().finish().cancel("now")
    assert world.status.phase == "Succeeded"


def test_a_retry_starts_what_failed_and_nothing_that_succeeded():
    world = World().run("prepare")
    world.cluster.fail(world.start("train"), 77)
    world.settle().retry("1")
    assert world.created == ["prepare-a1", "train-a1", "train-a2"]
    assert world.finish().status.phase == "Succeeded"


@pytest.mark.parametrize("code", [65, 66])
def test_a_retry_of_a_stage_that_did_not_find_what_it_needs_looks_for_that_first(code):
    world = World().run("prepare")
    world.cluster.fail(world.start("train"), code, "there are no packed rows")
    world.settle().retry("1")
    assert world.created == ["prepare-a1", "train-a1", "prepare-a2"]
    assert world.run("prepare").created[-1] == "train-a2"
    assert world.finish().status.phase == "Succeeded"


def test_what_a_lost_workspace_took_with_it_is_made_again_from_the_start():
    world = World().run("prepare").run("train")
    world.cluster.fail(world.start("evaluate"), 66, "there is no adapter")
    world.settle().retry("1")
    assert world.created[3:] == ["prepare-a2"]
    assert world.finish().created[3:6] == ["prepare-a2", "train-a2", "evaluate-a2"]


def test_a_retry_gives_fresh_budgets():
    world = World(a_pipeline(train={"retries": {"failures": 1}})).run("prepare")
    for token in ("1", "2", "3"):
        for _ in range(2):
            world.cluster.fail(world.after(1000).start("train"), 70)
            world.settle()
        assert world.status.phase == "Failed"
        world.retry(token)
        assert world.condition("Finished") == ("False", "Progressing")
    assert world.stage("train").failures == 6


def test_a_retry_does_not_wait():
    world = World()
    world.cluster.fail(world.start("prepare"), 70)
    assert world.settle().running is None
    world.retry("now")
    assert world.running == "prepare"


def test_a_retry_while_it_runs_still_counts_how_that_ends():
    world = World()
    job = world.start("prepare")
    world.retry("now")
    world.cluster.fail(job, 65)
    world.settle()
    assert world.status.phase == "Failed"
    assert world.created == ["prepare-a1"]


@pytest.mark.parametrize("token", ["", "x"])
def test_every_word_is_obeyed_once_also_an_empty_one(token):
    world = World()
    world.cluster.fail(world.start("prepare"), 65)
    world.settle().retry(token)
    assert world.created[-1] == "prepare-a2"
    world.cluster.fail(world.start("prepare"), 65)
    assert world.settle().status.phase == "Failed"
    world.cancel(token)
    assert world.status.cancelled
