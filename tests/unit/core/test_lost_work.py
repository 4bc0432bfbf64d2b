"""Lost work: the steps that an interruption forces to be repeated, and their duration."""

import pytest
from support.operator.scenario import Scenario

from finetune_trainer.contract import PushConfig, parse_config
from finetune_trainer.contract.environment import CONFIG


def train(
    scenario: Scenario, start: int | None, reached: int, seconds: float = 2.0
) -> str:
    """Start an attempt that begins at step `start` and reaches step `reached`."""
    job = scenario.start("train")
    if start is not None:
        scenario.cluster.progress(
            job, step=reached, start_step=start, total=1000, step_seconds=seconds
        )
        scenario.reconcile_until_stable()
    return job


def lost(scenario: Scenario) -> tuple[int, float]:
    assert scenario.stage("train").lost_steps == scenario.status.lost_steps
    return scenario.status.lost_steps, scenario.status.lost_seconds


def losses(scenario: Scenario) -> list[int | None]:
    return [attempt.lost_steps for attempt in scenario.stage("train").attempts]


@pytest.fixture
def scenario() -> Scenario:
    return Scenario().run("prepare")


def test_saved_steps_are_not_lost(scenario):
    scenario.cluster.evict(train(scenario, 0, 70), step=73, saved=73)
    train(scenario, 73, 80)
    assert lost(scenario) == (0, 0.0)
    assert losses(scenario) == [0, None]


def test_steps_after_the_checkpoint_are_lost_with_the_node(scenario):
    scenario.lose_node(train(scenario, 0, 750))
    assert lost(scenario.reconcile_until_stable()) == (
        0,
        0.0,
    )  # unknown until the next attempt reports its start step
    train(scenario, 500, 510)
    assert lost(scenario) == (250, 500.0)
    assert losses(scenario) == [250, None]


def test_lost_steps_are_counted_once(scenario):
    scenario.lose_node(train(scenario, 0, 750))
    job = train(scenario, 500, 510)
    for step in (520, 600, 800):
        scenario.cluster.progress(job, step=step, start_step=500, step_seconds=2.0)
        scenario.reconcile_until_stable()
    assert lost(scenario) == (250, 500.0)


def test_losses_of_several_interruptions_add_up(scenario):
    scenario.lose_node(train(scenario, 0, 750))
    scenario.lose_node(train(scenario, 500, 600))
    scenario.lose_node(train(scenario, 500, 620, seconds=1.0))
    train(scenario, 600, 601)
    assert losses(scenario) == [250, 100, 20, None]
    assert lost(scenario) == (370, 720.0)


def test_resume_from_older_checkpoint_loses_more_steps(scenario):
    scenario.cluster.evict(train(scenario, 0, 750), step=750, saved=750)
    train(scenario, 250, 251)  # the two newest checkpoints were corrupt
    assert lost(scenario) == (500, 1000.0)


def test_attempt_without_steps_keeps_previous_loss_open(scenario):
    scenario.lose_node(train(scenario, 0, 750))
    scenario.lose_node(train(scenario, None, 0))
    scenario.reconcile_until_stable()
    assert lost(scenario) == (0, 0.0)
    train(scenario, 500, 501)
    assert losses(scenario) == [250, None, None]
    assert lost(scenario) == (250, 500.0)


def test_progress_without_start_step_settles_nothing(scenario):
    scenario.lose_node(train(scenario, 0, 750))
    job = scenario.start("train")
    scenario.cluster.progress(job, step=0, note="loading the model")
    scenario.reconcile_until_stable()
    assert lost(scenario) == (0, 0.0)
    scenario.lose_node(job)
    train(scenario, 500, 501)
    assert losses(scenario) == [250, None, None]
    assert lost(scenario) == (250, 500.0)


def test_termination_message_overrides_last_progress(scenario):
    scenario.cluster.evict(train(scenario, 0, 700), step=730, saved=700)
    train(scenario, 700, 701)
    assert losses(scenario) == [30, None]


def test_loss_is_settled_when_next_attempt_ends(scenario):
    scenario.lose_node(train(scenario, 0, 750))
    job = scenario.start("train")
    scenario.cluster.progress(job, step=510, start_step=500, step_seconds=2.0)
    scenario.lose_node(job)  # both in one reconcile
    scenario.reconcile_until_stable()
    assert lost(scenario) == (250, 500.0)


def test_new_identity_loses_no_steps_of_the_old_one(scenario):
    scenario.cluster.evict(train(scenario, 0, 750), step=750, saved=500)
    scenario.reconcile_until_stable().edit(train={"lora": {"rank": 4}})
    scenario.cluster.evict(scenario.attempt("train").job, disruption=None)
    train(scenario, 0, 10)
    assert lost(scenario) == (0, 0.0)


def test_new_resources_and_retry_keep_lost_steps(scenario):
    scenario.lose_node(train(scenario, 0, 750))
    scenario.lose_node(train(scenario, 500, 510))
    scenario.pass_interruption_backoff().edit(
        train={"pod": {"resources": {"limits": {"memory": "64Gi"}}}}
    )
    scenario.cluster.evict(scenario.attempt("train").job, disruption=None)
    train(scenario, 500, 505)
    scenario.retry("now")
    assert lost(scenario) == (260, 520.0)
    assert scenario.stage("train").interruptions == 2
    assert scenario.stage("train").interruptions_counted == 0


def test_push_config_contains_lineage_of_training(scenario):
    scenario.lose_node(train(scenario, 0, 750))
    train(scenario, 500, 990)
    scenario.complete("train").run("evaluate")
    config = parse_config(
        scenario.cluster.jobs[scenario.attempt("push").job].template.env[CONFIG]
    )
    assert isinstance(config, PushConfig)
    assert config.lineage.pipeline == "team/demo"
    assert (
        config.lineage.interruptions,
        config.lineage.lost_steps,
        config.lineage.lost_seconds,
    ) == (1, 250, 500.0)
