"""Deadlines: whatever spot nodes do, `Auto` keeps each deadline that on-demand nodes alone would have kept.

The simulator of bench/ runs the functions of core/capacity/policy.py; here the whole reconcile loop decides, minute by
minute.
"""

import random
from datetime import timedelta

import pytest
from support.operator.placements import (
    FULL,
    H100,
    end_stopped,
    placed,
    training,
    wait_until_moved,
)
from support.operator.scenario import START, Scenario

from finetune_operator.core.observation import JobState

STEP = 6.0
"""Seconds of a step."""
TICK = 10
"""Seconds between two looks. The test loses up to two of them with each attempt."""
MEAN = 300
"""Mean seconds for which there are spot nodes, and for which there are none."""
DEFAULTS = {"shortStageSeconds": 0, "restartSeconds": 120, "returnSeconds": 120}


class Run:
    """A training whose spot nodes come and go; each call of `tick` is ten seconds."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.total = self.rng.randint(200, 500)
        self.start_up = self.rng.choice([10, 20, 120])
        self.interval = self.rng.choice([30, 180, 600])
        work = self.total * STEP
        needed = self.start_up + work
        self.deadline = START + timedelta(
            seconds=60 + needed + self.rng.choice([40, 90, 150, 250, 400, 900, work])
        )
        self.up = self.rng.random() < 0.6
        self.until = self.rng.expovariate(1 / MEAN)
        train = {
            "checkpoint": {"everySeconds": self.interval},
            "maxInterruptions": 1000,
        }
        estimate = {"expectedSeconds": max(1, int(work * self.rng.uniform(0.8, 1.2)))}
        self.scenario: Scenario = training(
            *H100,
            deadline=self.deadline.isoformat(),
            placement=estimate,
            defaults=DEFAULTS,
            **train,
        )
        self.durable = 0
        self.begin = 0
        self.elapsed = 0.0

    def tick(self) -> bool:
        """Return whether training is done some seconds later."""
        scenario = self.scenario.after(TICK)
        cluster = self.scenario.cluster
        taken = self.turn_spot()
        job = scenario.attempt("train").job
        if job not in cluster.jobs or not cluster.jobs[job].live:
            scenario.reconcile_until_stable()
            return False
        spot = placed(scenario)[0] == "Spot"
        if cluster.jobs[job].asked_to_stop:
            self.durable = max(self.durable, self.step)
            end_stopped(scenario)
        elif cluster.jobs[job].observed.state is not JobState.RUNNING:
            self.place(job, spot=spot)
        elif taken and spot:
            self.evict(job)
        else:
            return self.work(job)
        scenario.reconcile_until_stable()
        return False

    @property
    def step(self) -> int:
        """The step of the running attempt."""
        return self.begin + max(0, int((self.elapsed - self.start_up) / STEP))

    def turn_spot(self) -> bool:
        """Return whether spot nodes have just gone."""
        self.until -= TICK
        if self.until > 0:
            return False
        self.up = not self.up
        self.until = self.rng.expovariate(1 / MEAN)
        return not self.up

    def place(self, job: str, *, spot: bool) -> None:
        """Start the process if there is a node for it."""
        cluster = self.scenario.cluster
        if spot and not self.up:
            since = cluster.jobs[job].observed.unschedulable_since or cluster.now
            cluster.update_job(job, blocker=FULL, unschedulable_since=since)
            return
        self.begin = self.durable
        self.elapsed = 0.0
        cluster.start(job)

    def evict(self, job: str) -> None:
        """Take the node, with notice or without."""
        if self.rng.random() < 0.5:
            self.durable = max(self.durable, self.step)
            self.scenario.cluster.evict(job, self.step, self.durable)
        else:
            self.durable = max(self.durable, self.step - int(self.interval / STEP))
            self.scenario.lose_node(job)

    def work(self, job: str) -> bool:
        self.elapsed += TICK
        if self.step >= self.total:
            return True
        if self.step > self.begin:
            known = {
                "start_step": self.begin,
                "saved_step": self.durable,
                "step_seconds": STEP,
                "total": self.total,
            }
            self.scenario.cluster.progress(job, self.step, **known)
        self.scenario.reconcile_until_stable()
        return False


@pytest.mark.parametrize("seed", range(12))
def test_feasible_deadline_is_kept(seed):
    run = Run(seed)
    while not run.tick():
        assert run.scenario.cluster.now < run.deadline + timedelta(days=1)
    attempts = run.scenario.attempt("train").number
    assert run.scenario.cluster.now <= run.deadline + timedelta(
        seconds=2 * TICK * attempts
    )


@pytest.mark.parametrize("slack", [60, 90, 120, 150, 200, 250, 400])
def test_attempt_in_time_does_not_wait_for_full_spot_nodes(slack):
    """Starts are quick, and an eviction has lost nothing, so that there seems to be time to spare. Spot is full."""
    later = (START + timedelta(hours=500)).isoformat()
    scenario = training(*H100, placement={"expectedSeconds": 8400}, deadline=later)
    job = scenario.start("train")
    scenario.after(1215)
    report(scenario, job, 200, start=0)
    scenario.cluster.evict(job, 200, 200)
    deadline = scenario.cluster.now + timedelta(seconds=1200 * STEP + slack)
    scenario.edit(deadline=deadline.isoformat())
    scenario.pass_interruption_backoff()
    step = 200
    while step < 1400:
        step = run_or_wait(scenario, step)
    assert scenario.cluster.now <= deadline


def run_or_wait(scenario: Scenario, step: int) -> int:
    """Return the last step of the newest attempt, which runs to its end or waits for spot nodes that do not come."""
    job = scenario.attempt("train").job
    if placed(scenario)[0] == "Spot":
        assert wait_until_moved(scenario)
        return step
    scenario.cluster.start(job)
    scenario.after(15)
    begin = step
    while step < 1400 and not scenario.cluster.jobs[job].asked_to_stop:
        step += 10
        scenario.after(10 * STEP)
        report(scenario, job, step, start=begin)
    if step < 1400:
        end_stopped(scenario)
    return step


def report(scenario: Scenario, job: str, step: int, *, start: int) -> None:
    scenario.cluster.progress(
        job, step, start_step=start, saved_step=step, step_seconds=STEP, total=1400
    )
    scenario.reconcile_until_stable()
