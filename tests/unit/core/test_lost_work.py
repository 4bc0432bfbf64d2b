"""What interruptions cost: steps that had to be done again, and the seconds they had taken."""

import pytest
from support.scenario import World

from finetune_trainer.contract import PushConfig, parse_config
from finetune_trainer.contract.environment import CONFIG


def train(world: World, start: int | None, reached: int, seconds: float = 2.0) -> str:
    """Let an attempt begin at one step and reach another."""
    job = world.start("train")
    if start is not None:
        world.cluster.progress(job, step=reached, start_step=start, total=1000, step_seconds=seconds)
        world.settle()
    return job


def lost(world: World) -> tuple[int, float]:
    assert world.stage("train").lost_steps == world.status.lost_steps
    return world.status.lost_steps, world.status.lost_seconds


def losses(world: World) -> list[int | None]:
    return [attempt.lost_steps for attempt in world.stage("train").attempts]


@pytest.fixture
def world() -> World:
    return World().run("prepare")


def test_nothing_is_lost_where_everything_was_saved(world):
    world.cluster.evict(train(world, 0, 70), step=73, saved=73)
    train(world, 73, 80)
    assert lost(world) == (0, 0.0)
    assert losses(world) == [0, None]


def test_what_was_done_after_the_checkpoint_is_lost_with_the_node(world):
    world.lose_node(train(world, 0, 750))
    assert lost(world.settle()) == (0, 0.0)  # not known yet
    train(world, 500, 510)
    assert lost(world) == (250, 500.0)
    assert losses(world) == [250, None]


def test_a_loss_is_counted_once_however_often_it_is_looked_at(world):
    world.lose_node(train(world, 0, 750))
    job = train(world, 500, 510)
    for step in (520, 600, 800):
        world.cluster.progress(job, step=step, start_step=500, step_seconds=2.0)
        world.settle()
    assert lost(world) == (250, 500.0)


def test_losses_of_several_interruptions_add_up(world):
    world.lose_node(train(world, 0, 750))
    world.lose_node(train(world, 500, 600))
    world.lose_node(train(world, 500, 620, seconds=1.0))
    train(world, 600, 601)
    assert losses(world) == [250, 100, 20, None]
    assert lost(world) == (370, 720.0)


def test_going_back_to_an_older_checkpoint_costs_more(world):
    world.cluster.evict(train(world, 0, 750), step=750, saved=750)
    train(world, 250, 251)  # the newest two were broken
    assert lost(world) == (500, 1000.0)


def test_an_attempt_that_got_nowhere_does_not_hide_the_loss_of_the_one_before(world):
    world.lose_node(train(world, 0, 750))
    world.lose_node(train(world, None, 0))
    world.settle()
    assert lost(world) == (0, 0.0)
    train(world, 500, 501)
    assert losses(world) == [250, None, None]
    assert lost(world) == (250, 500.0)


def test_a_process_that_does_not_know_yet_where_it_begins_settles_nothing(world):
    world.lose_node(train(world, 0, 750))
    job = world.start("train")
    world.cluster.progress(job, step=0, note="loading the model")
    world.settle()
    assert lost(world) == (0, 0.0)
    world.lose_node(job)
    train(world, 500, 501)
    assert losses(world) == [250, None, None]
    assert lost(world) == (250, 500.0)


def test_the_last_word_of_a_process_counts_more_than_its_last_progress(world):
    world.cluster.evict(train(world, 0, 700), step=730, saved=700)
    train(world, 700, 701)
    assert losses(world) == [30, None]


def test_a_loss_is_known_at_the_latest_when_the_next_attempt_ends(world):
    world.lose_node(train(world, 0, 750))
    job = world.start("train")
    world.cluster.progress(job, step=510, start_step=500, step_seconds=2.0)
    world.lose_node(job)  # nobody looked in between
    world.settle()
    assert lost(world) == (250, 500.0)


def test_another_training_loses_nothing_of_the_old_one(world):
    world.cluster.evict(train(world, 0, 750), step=750, saved=500)
    world.settle().edit(train={"lora": {"rank": 4}})
    world.cluster.evict(world.attempt("train").job, why=None)
    train(world, 0, 10)
    assert lost(world) == (0, 0.0)


def test_other_resources_or_a_retry_do_not_make_the_past_unhappen(world):
    world.lose_node(train(world, 0, 750))
    world.lose_node(train(world, 500, 510))
    world.settle().edit(train={"resources": {"memory": "64Gi"}})
    world.cluster.evict(world.attempt("train").job, why=None)
    train(world, 500, 505)
    world.retry("now")
    assert lost(world) == (260, 520.0)
    assert world.stage("train").interruptions == 2
    assert world.stage("train").interruptions_counted == 0


def test_the_model_card_is_told_what_training_went_through(world):
    world.lose_node(train(world, 0, 750))
    train(world, 500, 990)
    world.complete("train").run("evaluate")
    config = parse_config(world.cluster.jobs[world.attempt("push").job].template.env[CONFIG])
    assert isinstance(config, PushConfig)
    assert config.lineage.pipeline == "team/demo"
    assert (config.lineage.interruptions, config.lineage.lost_steps, config.lineage.lost_seconds) == (1, 250, 500.0)
