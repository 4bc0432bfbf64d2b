"""How often a stage is tried, how long it waits in between and how long it may run in all."""

from datetime import timedelta

import pytest
from support.scenario import World, a_pipeline

from finetune_operator.api.status import ATTEMPTS_KEPT, Outcome
from finetune_operator.core.settings import Settings


def fail(world: World, times: int, code: int = 70) -> World:
    for _ in range(times):
        world.cluster.fail(world.after(1000).start("train"), code)
        world.settle()
    return world


def interrupt(world: World, times: int) -> World:
    for _ in range(times):
        world.lose_node(world.start("train"))
        world.settle()
    return world


def test_failures_and_interruptions_have_budgets_of_their_own():
    world = World(a_pipeline(train={"retries": {"failures": 2, "interruptions": 3}})).run("prepare")
    interrupt(fail(world, 2).after(1000), 3)
    assert (world.stage("train").failures, world.stage("train").interruptions) == (2, 3)
    assert world.finish().status.phase == "Succeeded"


def test_one_failure_more_than_allowed_ends_it():
    world = fail(World(a_pipeline(train={"retries": {"failures": 2}})).run("prepare"), 3)
    assert world.condition("Stalled") == ("True", "RetriesExhausted")
    assert "failed 3 times" in world.stage("train").message
    assert world.after(1e6).settle().created[-1] == "train-a3"


def test_one_interruption_more_than_allowed_ends_it():
    world = interrupt(World(a_pipeline(train={"retries": {"interruptions": 2}})).run("prepare"), 3)
    assert world.condition("Stalled") == ("True", "RetriesExhausted")
    assert "interrupted 3 times: its node is gone" in world.stage("train").message


def test_a_larger_budget_lets_it_go_on():
    world = fail(World(a_pipeline(train={"retries": {"failures": 0}})).run("prepare"), 1)
    assert world.status.phase == "Failed"
    world.edit(train={"retries": {"failures": 1}})
    assert world.after(1000).finish().status.phase == "Succeeded"


def test_the_wait_doubles_with_each_failure_up_to_a_limit():
    world = World(a_pipeline(train={"retries": {"failures": 100}})).run("prepare")
    waits = []
    for _ in range(9):
        world.cluster.fail(world.start("train"), 70)
        world.settle()
        assert world.next_look
        waits.append(world.next_look.total_seconds())
        world.after(waits[-1] - 1).settle()
        assert world.running is None
        world.after(1).settle()
    assert waits == [10, 20, 40, 80, 160, 320, 600, 600, 600]


def test_backoff_never_overflows():
    assert Settings().backoff(10**9) == timedelta(minutes=10)


def test_attempts_are_numbered_for_ever_and_the_newest_ten_are_kept():
    world = interrupt(World().run("prepare"), 15)
    numbers = [attempt.number for attempt in world.stage("train").attempts]
    assert numbers == list(range(16 - ATTEMPTS_KEPT + 1, 17))
    assert world.stage("train").interruptions == 15
    assert world.status.interruptions == 15
    assert len(set(world.created)) == len(world.created)


def test_a_stage_is_stopped_when_its_time_is_up():
    world = World(a_pipeline(train={"timeoutSeconds": 100})).run("prepare")
    job = world.start("train")
    assert world.next_look == timedelta(seconds=100)
    world.after(99).settle()
    assert not world.cluster.jobs[job].asked_to_stop
    world.after(1).settle()
    assert world.cluster.jobs[job].asked_to_stop
    world.cluster.evict(job, why=None)
    world.settle()
    assert (world.stage("train").state, world.stage("train").reason) == ("Failed", "DeadlineExceeded")
    assert world.attempt("train").outcome == Outcome.STOPPED
    assert world.edit(train={"timeoutSeconds": 500}).finish().status.phase == "Succeeded"


def test_only_time_in_which_it_ran_counts_towards_the_timeout():
    world = World(a_pipeline(train={"timeoutSeconds": 100})).run("prepare")
    for _ in range(3):
        world.after(1000).settle()  # waits for a node
        job = world.start("train")
        world.after(30).lose_node(job)
        world.settle()
    assert world.stage("train").active_seconds == 90
    world.start("train")
    assert world.next_look == timedelta(seconds=10)


def test_all_stages_together_have_a_deadline():
    world = World(a_pipeline(activeDeadlineSeconds=100)).run("prepare")  # 60 s
    job = world.after(5000).start("train")
    assert world.next_look == timedelta(seconds=40)
    world.after(40).settle()
    world.cluster.evict(job, why=None)
    world.settle()
    assert world.condition("Finished") == ("True", "DeadlineExceeded")
    assert "activeDeadlineSeconds" in world.status.conditions[0].message
    assert world.edit(activeDeadlineSeconds=1000).finish().status.phase == "Succeeded"


def test_a_retry_after_the_deadline_gets_the_whole_time_again():
    world = World(a_pipeline(activeDeadlineSeconds=60)).run("prepare")
    assert world.condition("Finished") == ("True", "DeadlineExceeded")
    world.retry("again")
    assert world.created[-1] == "train-a1"
    assert world.condition("Finished") == ("False", "Progressing")


def test_what_an_earlier_spec_took_does_not_count_towards_the_timeout():
    world = World(a_pipeline(train={"timeoutSeconds": 100})).run("prepare")
    job = world.start("train")
    world.after(90).edit(train={"lora": {"rank": 4}})
    world.cluster.evict(job, why=None)
    world.start("train")
    assert world.next_look == timedelta(seconds=100)


def test_running_work_is_looked_at_now_and_then():
    world = World()
    world.look()
    assert world.next_look == Settings().resync


@pytest.mark.parametrize("state", ["finished", "failed", "suspended"])
def test_where_nothing_can_happen_by_itself_nobody_looks(state):
    world = World()
    if state == "finished":
        world.finish()
    elif state == "failed":
        world.cluster.fail(world.start("prepare"), 65)
        world.settle()
    else:
        job = world.start("prepare")
        world.edit(suspend=True).cluster.evict(job, why=None)
        world.settle()
    assert world.next_look is None


def test_nothing_starts_after_the_last_stage_that_is_wanted():
    world = World(settings=Settings(until="train")).finish()
    assert world.created == ["prepare-a1", "train-a1"]
    assert world.next_look is None


def test_a_stage_that_is_not_wanted_is_not_waited_for_either():
    world = World(a_pipeline()).run_before("evaluate")
    world.cluster.fail(world.start("evaluate"), 70)
    world.settle()
    world.settings = Settings(until="train")
    world.after(1000).settle()
    assert world.next_look is None


def test_an_old_attempt_that_is_slow_to_stop_takes_no_time_from_the_new_ones():
    world = World(a_pipeline(activeDeadlineSeconds=200)).run("prepare")
    world.start("train")
    world.after(95).edit(seed=7)
    job = world.start("prepare")
    world.after(60).settle()  # with the old training, which has not stopped yet, it would be 215
    assert not world.cluster.jobs[job].asked_to_stop
    assert world.next_look == timedelta(seconds=140)
