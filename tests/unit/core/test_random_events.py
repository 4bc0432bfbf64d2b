"""Random events in random order, including the death of the operator between any two requests (hypothesis)."""

import contextlib
from datetime import timedelta
from decimal import Decimal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pydantic import ValidationError
from support.operator.random_edits import EDITS, NO_NODE, SETTINGS
from support.operator.scenario import (
    ORDER,
    RESULTS,
    Scenario,
    a_pipeline,
    a_result,
    merged,
    scores,
)
from support.operator.status_checks import check_conditions, check_end

from finetune_operator.api.conditions import Reason
from finetune_operator.api.group import CANCEL_ANNOTATION, RETRY_ANNOTATION
from finetune_operator.api.spec import PipelineSpec
from finetune_operator.api.status import Outcome, PipelineStatus, StageStatus
from finetune_operator.core.metadata import job_name
from finetune_operator.core.observation import Blocker, JobState
from finetune_operator.errors import ClusterError

PICK = st.randoms(use_true_random=False)
WHICH = st.sampled_from([0, 0, 1])
"""The pipeline of an event; the first has all stages."""


KNOWN_LATER = {
    "lost_steps",
    "lost_seconds",
    "lost_cost",
    "last_step",
    "saved_step",
    "steps",
}
"""Fields of an ended attempt that only the next attempt shows: how far it has come, and how much was lost."""


class Killed(BaseException):
    """Simulates the death of the operator's process."""


class RandomEvents(RuleBasedStateMachine):
    """Rules are the events; invariants are checked after each of them.

    Two pipelines share one claim. The MemoryCluster raises InvariantViolation when both would write to it.
    """

    def __init__(self) -> None:
        super().__init__()
        retries = {"maxFailures": 2, "maxInterruptions": 3}
        self.scenario = Scenario(
            a_pipeline(prepare=retries, train=retries), settings=SETTINGS
        )
        self.cluster = self.scenario.cluster
        shared = {"existingClaim": "demo-workspace"}
        spec = a_pipeline(evaluate=None, push=None, deploy=None, workspace=shared)
        uid = "8a8a8a8a-0000-4000-8000-000000000000"
        other = Scenario(spec, name="other", cluster=self.cluster, uid=uid)
        self.scenarios = (self.scenario, other)
        self.ended: dict[str, dict] = {}
        self.spent: dict[str, Decimal] = {}
        self.created = 0

    @property
    def live(self) -> list[str]:
        return [name for name, job in self.cluster.jobs.items() if job.live]

    @rule(
        moment=st.integers(0, 14),
        error=st.sampled_from([Killed, ClusterError]),
        which=WHICH,
    )
    def reconcile_with_fault(
        self, moment: int, error: type[BaseException], which: int
    ) -> None:
        remaining = [moment]

        def fault(name: str) -> None:
            remaining[0] -= 1
            if remaining[0] == 0:
                raise error(name)

        self.cluster.inject_fault = fault
        with contextlib.suppress(Killed, ClusterError):
            self.scenarios[which].reconcile()
        self.cluster.inject_fault = lambda _moment: None

    @rule(which=WHICH)
    def reconcile(self, which: int) -> None:
        self.scenarios[which].reconcile()

    @rule(which=WHICH)
    def reconcile_twice(self, which: int) -> None:
        """Check that a reconcile asks for another reconcile if this would do anything.

        The watch event of the operator's own write wakes no pipeline.
        """
        scenario = self.scenarios[which]
        scenario.reconcile()
        asked = scenario.requeue_after
        before = (list(self.cluster.applied), scenario.status.finished_at)
        scenario.reconcile()
        if asked is None or asked > timedelta(seconds=1):
            assert (list(self.cluster.applied), scenario.status.finished_at) == before
            assert (asked is None) is (scenario.requeue_after is None)

    @rule(seconds=st.sampled_from([0, 1, 9, 45, 700, 100_000]))
    def time_passes(self, seconds: int) -> None:
        self.scenario.after(seconds)

    @rule(changes=st.sampled_from(EDITS), which=WHICH)
    def user_edits(self, changes: dict, which: int) -> None:
        scenario = self.scenarios[which]
        data = scenario.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
        with contextlib.suppress(ValidationError):  # the API server would reject it
            scenario.spec = PipelineSpec.model_validate(merged(data, changes))
        self.cluster.edit(scenario.key, scenario.spec)

    @rule(which=WHICH, reconciled=st.booleans())
    def user_deletes_and_creates_again(self, which: int, reconciled: bool) -> None:  # noqa: FBT001  hypothesis
        """Delete the pipeline, and create another of its name while the Jobs of the first still terminate."""
        scenario = self.scenarios[which]
        self.cluster.delete(scenario.key)
        if reconciled:
            scenario.reconcile()
        self.created += 1
        self.cluster.submit(
            scenario.key,
            scenario.spec,
            f"{self.created:08x}-1111-4000-8000-000000000000",
        )

    @rule(
        annotation=st.sampled_from(
            [CANCEL_ANNOTATION, RETRY_ANNOTATION, RETRY_ANNOTATION]
        ),
        token=st.sampled_from(["", *"123"]),
        which=WHICH,
    )
    def user_annotates(self, annotation: str, token: str, which: int) -> None:
        self.cluster.annotate(self.scenarios[which].key, annotation, token)

    @rule(digest=st.sampled_from(["sha256:1", "sha256:2"]))
    def data_changes(self, digest: str) -> None:
        self.cluster.source_digests["hf://org/data/train.jsonl"] = digest

    @rule(pick=PICK, reason=st.sampled_from([Reason.POD_REFUSED, Reason.SPEC_INVALID]))
    def api_server_refuses(self, pick, reason: Reason) -> None:
        scenario = pick.choice(self.scenarios)
        uid = self.cluster.pipelines[scenario.key].uid
        stage = pick.choice(ORDER)
        attempts = (
            scenario.status.stages[stage].attempts if scenario.status.stages else ()
        )
        number = attempts[-1].number if attempts else 0
        names = [
            job_name(scenario.key.name, uid, stage, number + later) for later in (0, 1)
        ]
        self.cluster.refusals[pick.choice(["workspace", "service", *names])] = Blocker(
            reason, pick.choice("ab") * 5000
        )

    @rule()
    def api_server_accepts_again(self) -> None:
        self.cluster.refusals.clear()

    @precondition(lambda self: self.live)
    @rule(pick=PICK, step=st.integers(0, 100), saved=st.integers(0, 100))
    def process_starts_and_reports_progress(self, pick, step: int, saved: int) -> None:
        name = pick.choice(self.live)
        if self.cluster.jobs[name].observed.started_at is None:
            self.cluster.start(name)
        self.cluster.progress(
            name,
            step=saved + step,
            start_step=pick.choice([None, saved]),
            step_seconds=0.5,
        )

    @precondition(lambda self: self.live)
    @rule(pick=PICK)
    def pod_finds_no_node(self, pick) -> None:
        name = pick.choice(self.live)
        if self.cluster.jobs[name].observed.started_at is None:
            self.cluster.update_job(
                name, blocker=NO_NODE, unschedulable_since=self.cluster.now
            )

    @precondition(lambda self: self.live)
    @rule(pick=PICK, score=st.sampled_from([0.5, 0.6, 0.95, float("nan")]))
    def process_succeeds(self, pick, score: float) -> None:
        name = pick.choice(self.live)
        template = self.cluster.jobs[name].template
        fields = (
            scores(score, pick.choice([None, 0.01]))
            if template.stage == "evaluate"
            else RESULTS[template.stage]
        )
        self.cluster.complete(
            name, a_result(template.stage, template.identity, **fields)
        )

    @precondition(lambda self: self.live)
    @rule(pick=PICK, code=st.sampled_from([1, 64, 65, 66, 69, 70, 75, 77, 137, 143]))
    def process_fails(self, pick, code: int) -> None:
        self.cluster.fail(pick.choice(self.live), code, pick.choice(["", "x" * 4000]))

    @precondition(lambda self: self.live)
    @rule(pick=PICK, step=st.integers(0, 100))
    def job_is_disrupted(self, pick, step: int) -> None:
        name = pick.choice(self.live)
        disruptions = (
            lambda: self.cluster.evict(name, step=step, saved=step // 2),
            lambda: self.cluster.evict(name, disruption=None),
            lambda: self.scenario.lose_node(name, reason="y" * 5000),
            lambda: self.scenario.run_out_of_memory(name),
            lambda: self.cluster.complete(name, None),
            lambda: self.cluster.delete_job(name),
        )
        pick.choice(disruptions)()

    @precondition(lambda self: self.cluster.jobs)
    @rule(pick=PICK)
    def finished_job_is_deleted(self, pick) -> None:
        finished = [name for name in self.cluster.jobs if name not in self.live]
        if finished:
            self.cluster.delete_job(pick.choice(finished))

    @invariant()
    def status_survives_a_round_trip(self) -> None:
        for scenario in self.scenarios:
            text = self.cluster.pipelines[scenario.key].status
            status = PipelineStatus.model_validate_json(text)
            assert (
                text == "{}"
                or status.model_dump_json(by_alias=True, exclude_none=True) == text
            )

    @property
    def stages(self) -> list[StageStatus]:
        return [
            stage
            for scenario in self.scenarios
            for stage in scenario.status.stages.values()
        ]

    @invariant()
    def stage_with_result_does_not_run(self) -> None:
        for stage in self.stages:
            last = stage.last_attempt
            if last and stage.result and last.outcome is Outcome.RUNNING:
                assert last.identity != stage.identity, (
                    f"{last.job} runs although its stage has a result"
                )

    @invariant()
    def ended_attempts_never_change(self) -> None:
        for stage in self.stages:
            numbers = [attempt.number for attempt in stage.attempts]
            assert numbers == sorted(set(numbers))
            assert len(numbers) <= 10
            for attempt in stage.attempts:
                if attempt.outcome is not Outcome.RUNNING:
                    known = attempt.model_dump(exclude=KNOWN_LATER)
                    assert self.ended.setdefault(attempt.job, known) == known

    @invariant()
    def only_the_last_attempt_is_running(self) -> None:
        for stage in self.stages:
            assert all(
                attempt.outcome is not Outcome.RUNNING
                for attempt in stage.attempts[:-1]
            )

    @invariant()
    def counts_are_never_negative(self) -> None:
        for stage in self.stages:
            assert min(stage.failures_counted, stage.interruptions_counted) >= 0
            assert min(stage.lost_steps, stage.lost_seconds, stage.active_seconds) >= 0

    @invariant()
    def every_attempt_is_paid_once(self) -> None:
        for scenario in self.scenarios:
            costs = scenario.status.costs
            if costs is None:
                continue
            uid = self.cluster.pipelines[scenario.key].uid
            spent = Decimal()
            for stage in scenario.status.stages.values():
                spent += sum(attempt.cost or 0 for attempt in stage.attempts)
                spent += stage.earlier_costs.spent if stage.earlier_costs else 0
            assert costs.spent == spent
            assert costs.spent >= self.spent.get(uid, 0)
            assert 0 <= costs.lost <= costs.spent
            self.spent[uid] = costs.spent

    @invariant()
    def refusals_are_of_distinct_subjects(self) -> None:
        for scenario in self.scenarios:
            subjects = [refusal.subject for refusal in scenario.status.refusals]
            assert len(subjects) == len(set(subjects))

    @invariant()
    def conditions_are_consistent(self) -> None:
        for scenario in self.scenarios:
            check_conditions(scenario)

    def teardown(self) -> None:
        """Check that both pipelines reach a stable end from any state, if no further event happens."""
        self.cluster.refusals.clear()
        for _ in range(300):
            before = self.change_counts()
            for scenario in self.scenarios:
                scenario.reconcile_until_stable()
            if self.change_counts() != before:
                continue  # the end of one may be the other's turn
            delays = [scenario.requeue_after for scenario in self.scenarios]
            times = [delay for delay in delays if delay is not None]
            if self.live:
                self.end_process(self.live[0])
            elif times:
                self.scenario.after(min(times).total_seconds())
            else:
                break
        before = self.change_counts()
        self.scenario.after(1e7)
        for scenario in self.scenarios:
            scenario.reconcile()
        assert self.change_counts() == before, "the pipelines were not stable"
        self.conditions_are_consistent()
        suspended = any(
            scenario.status.phase == "Suspended" for scenario in self.scenarios
        )
        for scenario in self.scenarios:
            check_end(scenario, others_suspended=suspended)

    def change_counts(self) -> list[tuple[int, int, int]]:
        """Return the change counts of each pipeline; equal counts mean that nothing has happened between."""
        return [scenario.change_counts for scenario in self.scenarios]

    def end_process(self, name: str) -> None:
        """End a process as its Job wants it: by SIGTERM, or with its result a minute later."""
        job = self.cluster.jobs[name]
        if job.asked_to_stop:
            self.cluster.evict(name, disruption=None)
            return
        if job.observed.state is JobState.WAITING:
            self.cluster.start(name)
        self.scenario.after(60)
        self.cluster.complete(name, a_result(job.template.stage, job.template.identity))


TestRandomEvents = RandomEvents.TestCase
TestRandomEvents.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None, derandomize=True
)
