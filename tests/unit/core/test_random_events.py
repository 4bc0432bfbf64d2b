"""Random events in random order, including the death of the operator between any two requests (hypothesis)."""

import contextlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pydantic import ValidationError
from support.scenario import ORDER, RESULTS, Scenario, a_pipeline, a_result, kstatus, merged, scores

from finetune_operator.api.group import CANCEL_ANNOTATION, RETRY_ANNOTATION
from finetune_operator.api.spec import PipelineSpec
from finetune_operator.api.status import Outcome, PipelineStatus
from finetune_operator.errors import ClusterError

DEPLOY = {"deploy": {}, "push": {"target": "pvc://models/demo"}, "evaluate": {"tasks": {"exam": {}}}}
GATE = {"task": "exam", "threshold": 0.6}

EDITS = (
    {"suspend": True},
    {"suspend": False},
    {"seed": 1},
    {"seed": 0},
    {"train": {"lora": {"rank": 4}}},
    {"train": {"lora": {"rank": 8}}},
    {"train": {"resources": {"memory": "64Gi"}}},
    {"train": {"resources": {"memory": "32Gi"}}},
    {"train": {"timeoutSeconds": 50}},
    {"train": {"timeoutSeconds": None}},
    {"train": {"retries": {"failures": 0, "interruptions": 0}}},
    {"train": {"retries": {"failures": 9, "interruptions": 9}}},
    {"evaluate": {"gate": {**GATE, "threshold": 0.9}}},
    {"evaluate": {"gate": {**GATE, "metric": "f1"}}},
    {"evaluate": {"gate": {**GATE, "metric": "acc", "standardErrors": 2}}},
    {"push": {"when": "GatePassed"}},
    {"push": {"when": "Always"}, "deploy": {"when": "Always"}},
    {"push": None, "deploy": None},
    {"evaluate": None, "push": None, "deploy": None},
    {**DEPLOY, "deploy": {"when": "Always"}},
    {"activeDeadlineSeconds": 200},
    {"activeDeadlineSeconds": None},
)


class Killed(BaseException):
    """Simulates the death of the operator's process."""


class RandomEvents(RuleBasedStateMachine):
    """Rules are the events; invariants are checked after each of them."""

    def __init__(self) -> None:
        super().__init__()
        retries = {"retries": {"failures": 2, "interruptions": 3}}
        self.scenario = Scenario(a_pipeline(prepare=retries, train=retries))
        self.cluster = self.scenario.cluster
        self.ended: dict[str, dict] = {}

    @property
    def live(self) -> list[str]:
        return [name for name, job in self.cluster.jobs.items() if job.live]

    @rule(moment=st.integers(0, 14), error=st.sampled_from([Killed, ClusterError]))
    def reconcile_with_fault(self, moment: int, error: type[BaseException]) -> None:
        remaining = [moment]

        def fault(name: str) -> None:
            remaining[0] -= 1
            if remaining[0] == 0:
                raise error(name)

        self.cluster.inject_fault = fault
        with contextlib.suppress(Killed, ClusterError):
            self.scenario.reconcile()
        self.cluster.inject_fault = lambda _moment: None

    @rule()
    def reconcile(self) -> None:
        self.scenario.reconcile()

    @rule(seconds=st.sampled_from([0, 1, 9, 45, 700, 100_000]))
    def time_passes(self, seconds: int) -> None:
        self.scenario.after(seconds)

    @rule(changes=st.sampled_from(EDITS))
    def user_edits(self, changes: dict) -> None:
        data = self.scenario.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
        with contextlib.suppress(ValidationError):  # the API server would reject it
            self.scenario.spec = PipelineSpec.model_validate(merged(data, changes))
        self.cluster.edit(self.scenario.key, self.scenario.spec)

    @rule(
        annotation=st.sampled_from([CANCEL_ANNOTATION, RETRY_ANNOTATION, RETRY_ANNOTATION]),
        token=st.sampled_from(["", *"123"]),
    )
    def user_annotates(self, annotation: str, token: str) -> None:
        self.cluster.annotate(self.scenario.key, annotation, token)

    @rule(digest=st.sampled_from(["sha256:1", "sha256:2"]))
    def data_changes(self, digest: str) -> None:
        self.cluster.source_digests["hf://org/data/train.jsonl"] = digest

    @precondition(lambda self: self.live)
    @rule(pick=st.randoms(use_true_random=False), step=st.integers(0, 100), saved=st.integers(0, 100))
    def process_starts_and_reports_progress(self, pick, step: int, saved: int) -> None:
        name = pick.choice(self.live)
        if self.cluster.jobs[name].observed.started_at is None:
            self.cluster.start(name)
        self.cluster.progress(name, step=saved + step, start_step=pick.choice([None, saved]), step_seconds=0.5)

    @precondition(lambda self: self.live)
    @rule(pick=st.randoms(use_true_random=False), score=st.sampled_from([0.5, 0.6, 0.95, float("nan")]))
    def process_succeeds(self, pick, score: float) -> None:
        name = pick.choice(self.live)
        template = self.cluster.jobs[name].template
        fields = scores(score, pick.choice([None, 0.01])) if template.stage == "evaluate" else RESULTS[template.stage]
        self.cluster.complete(name, a_result(template.stage, template.identity, **fields))

    @precondition(lambda self: self.live)
    @rule(pick=st.randoms(use_true_random=False), code=st.sampled_from([1, 64, 65, 66, 69, 70, 75, 77, 137, 143]))
    def process_fails(self, pick, code: int) -> None:
        self.cluster.fail(pick.choice(self.live), code, pick.choice(["", "x" * 4000]))

    @precondition(lambda self: self.live)
    @rule(pick=st.randoms(use_true_random=False), step=st.integers(0, 100))
    def job_is_disrupted(self, pick, step: int) -> None:
        name = pick.choice(self.live)
        disruptions = (
            lambda: self.cluster.evict(name, step=step, saved=step // 2),
            lambda: self.cluster.evict(name, why=None),
            lambda: self.scenario.lose_node(name, why="y" * 5000),
            lambda: self.scenario.run_out_of_memory(name),
            lambda: self.cluster.complete(name, None),
            lambda: self.cluster.delete_job(name),
        )
        pick.choice(disruptions)()

    @precondition(lambda self: self.cluster.jobs)
    @rule(pick=st.randoms(use_true_random=False))
    def finished_job_is_deleted(self, pick) -> None:
        finished = [name for name in self.cluster.jobs if name not in self.live]
        if finished:
            self.cluster.delete_job(pick.choice(finished))

    @invariant()
    def status_survives_a_round_trip(self) -> None:
        text = self.cluster.pipelines[self.scenario.key].status
        status = PipelineStatus.model_validate_json(text)
        assert text == "{}" or status.model_dump_json(by_alias=True, exclude_none=True) == text

    @invariant()
    def stage_with_result_does_not_run(self) -> None:
        for name, stage in self.scenario.status.stages.items():
            last = stage.last_attempt
            running = last and last.outcome is Outcome.RUNNING and last.identity == stage.identity
            assert not (stage.result and running), f"{name} runs again although it has its result"

    @invariant()
    def ended_attempts_never_change(self) -> None:
        for stage in self.scenario.status.stages.values():
            numbers = [attempt.number for attempt in stage.attempts]
            assert numbers == sorted(set(numbers))
            assert len(numbers) <= 10
            for attempt in stage.attempts:
                if attempt.outcome is not Outcome.RUNNING:
                    known = attempt.model_dump(exclude={"lost_steps", "lost_seconds"})
                    assert self.ended.setdefault(attempt.job, known) == known

    @invariant()
    def only_the_last_attempt_is_running(self) -> None:
        for stage in self.scenario.status.stages.values():
            assert all(attempt.outcome is not Outcome.RUNNING for attempt in stage.attempts[:-1])

    @invariant()
    def counts_are_never_negative(self) -> None:
        for stage in self.scenario.status.stages.values():
            counts = (stage.failures_counted, stage.interruptions_counted, stage.lost_steps, stage.lost_seconds)
            assert min(counts) >= 0
            assert stage.active_seconds >= 0

    @invariant()
    def conditions_are_consistent(self) -> None:
        if not self.scenario.status.conditions:
            return
        scenario, status = self.scenario, self.scenario.status
        kinds = [c.type for c in status.conditions]
        assert len(kinds) == len(set(kinds))
        assert {c.status for c in status.conditions if c.type in {"Reconciling", "Stalled"}} <= {"True"}
        assert not {"Reconciling", "Stalled"} <= set(kinds)
        ready, finished = scenario.condition("Ready"), scenario.condition("Finished")
        assert ready
        assert finished
        assert ready[0] != "True" or finished[0] == "True"
        assert (finished[0] == "True") is (status.finished_at is not None)
        assert {c.observed_generation for c in status.conditions} == {status.observed_generation}
        assert status.phase in {"Pending", "Running", "Suspended", "Succeeded", "Failed", "Cancelled", "BelowThreshold"}

    def teardown(self) -> None:
        """Check that the pipeline reaches a stable end from any state, if no further event happens."""
        scenario = self.scenario
        scenario.reconcile_until_stable()
        for _ in range(60):
            scenario.finish()
            if scenario.requeue_after is None:
                break
            scenario.after(scenario.requeue_after.total_seconds())
        before = scenario.change_counts
        scenario.after(1e7).reconcile()
        assert scenario.change_counts == before, "the pipeline was not stable"
        self.conditions_are_consistent()
        finished = scenario.condition("Finished")
        assert finished
        assert finished[0] == "True" or scenario.status.phase == "Suspended"
        if finished[0] == "True":
            expected = {"Succeeded": "Current", "BelowThreshold": "InProgress"}.get(scenario.status.phase, "Failed")
            assert kstatus(scenario.generation, scenario.status) == expected
        if scenario.status.phase == "Succeeded":
            assert set(scenario.states.values()) <= {"Succeeded", "Skipped"}
        assert set(scenario.states) == set(ORDER)


TestRandomEvents = RandomEvents.TestCase
TestRandomEvents.settings = settings(max_examples=30, stateful_step_count=30, deadline=None, derandomize=True)
