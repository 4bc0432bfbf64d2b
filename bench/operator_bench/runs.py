"""One run of a variant on a fresh control plane, and what is measured in it."""

import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

from operator_bench.api import STAGES, Object
from operator_bench.audit import Requests, count_requests, created_objects
from operator_bench.cluster import BODIES, BenchCluster, cluster
from operator_bench.operator_process import (
    OperatorProcess,
    begin,
    read_result,
    running_module,
    running_operator,
)
from operator_bench.user import prepare_claims, submit
from processes import CpuAccount, cluster_programs, memory_mib, report_progress

OPERATOR = "operator"
NULL_COMPLETE = "null-complete"
NULL_POD = "null-pod"
VARIANTS = (OPERATOR, NULL_COMPLETE, NULL_POD)
SECONDS_PER_STAGE = 0.5
"""Timeout per stage; the slowest controller that was measured on two cores needs 0.12 s."""
OBSERVED = "observed.json"
PROMPT_MS = 1000.0
"""A stage's next Job that comes sooner is prompt: a pod needs longer to start."""
RESYNC_SECONDS = 10.0
"""How long a restarted operator is watched for writes, after it is idle."""


@dataclass(frozen=True)
class Run:
    """Figures of one run. Times are in seconds, transitions in milliseconds."""

    variant: str
    pipelines: int
    succeeded: int
    jobs: int
    stages_per_second: float
    makespan: float
    pods_makespan: float
    """Until the last pod has succeeded: the same event for all variants."""
    first_job: list[int]
    """p50, p95, p99 from the beginning to a pipeline's first Job."""
    from_pod: list[int]
    """p50, p95, p99 from a pod seen as Succeeded to the next Job seen."""
    from_complete: list[int]
    """The same from the Job seen as Complete; negative where the next Job came first."""
    prompt: float
    """Share of the stages whose next Job was seen less than a second after the pod's success."""
    cpu: dict[str, float]
    """CPU seconds by program."""
    cpu_ms_per_stage: float
    rss_idle: float
    rss_peak: float
    foreign_share: float
    all_writes: float
    """Writes of all programs per pipeline."""
    own: dict[str, float]
    """Requests of the measured program per pipeline, by verb and resource."""
    errors: dict[str, int]
    by_agent: dict[str, dict[str, float]]
    """Requests per pipeline by program and verb."""
    resync_writes: int | None = None
    """Writes of an operator that was restarted after all pipelines had finished."""

    def as_json(self) -> Object:
        """Return all figures."""
        return asdict(self)


@dataclass(frozen=True)
class Scenario:
    """What all runs of one invocation have in common."""

    workers: int | None
    """--workers of the operator; None: its own default."""
    existing_claims: bool
    """Whether the claims exist and are bound before a run. Else they are created in it, and pods wait for them."""
    interval: float = 0.0
    """Seconds between the creations of two pipelines; 0: all are created at once."""


def capture_bodies(scenario: Scenario, file: Path) -> None:
    """Run one pipeline; write the bodies of its claim and Jobs, as the operator sent them, without owners."""
    with tempfile.TemporaryDirectory() as name, cluster(Path(name), BODIES) as bench:
        prepare_claims(bench, 1, existing=scenario.existing_claims)
        with (
            running_operator(bench, scenario.workers),
            _observer(bench, 1, with_pipelines=True) as observer,
        ):
            submit(bench, 1, existing_claims=scenario.existing_claims)
            wait_observed(bench, observer, 1)
        bodies = created_objects(bench.audit_log, "operator")
    for body in bodies:
        body["metadata"].pop("ownerReferences", None)
    bodies.sort(
        key=lambda body: bool(body["kind"] == "Job")
    )  # a stable order: a claim first, then the Jobs
    kinds = [body["kind"] for body in bodies]
    expected = ["Job"] * len(STAGES)
    assert kinds == (
        expected if scenario.existing_claims else ["PersistentVolumeClaim", *expected]
    ), kinds
    file.write_text(json.dumps(bodies))


def run_variant(
    variant: str, count: int, scenario: Scenario, bodies: Path, *, resync: bool
) -> Run:
    """Create a control plane, run this many pipelines, and return the figures."""
    with tempfile.TemporaryDirectory() as name, cluster(Path(name)) as bench:
        prepare_claims(bench, count, existing=scenario.existing_claims)
        if variant == OPERATOR:
            return _run_operator(bench, count, scenario, resync=resync)
        trigger = variant.removeprefix("null-")
        arguments = [
            str(bench.kubeconfig("null")),
            str(bodies),
            str(count),
            "--on",
            trigger,
        ]
        with running_module("null_operator", *arguments) as process:
            measured = Measurement(bench, "null", process.pid)

            def work() -> float:
                begin(process)
                return 0.0  # its result has the time

            return measured.run(variant, count, work, lambda: read_result(process))


def _run_operator(
    bench: BenchCluster, count: int, scenario: Scenario, *, resync: bool
) -> Run:
    with running_operator(bench, scenario.workers) as operator:
        operator.wait_idle()
        measured = Measurement(bench, "operator", operator.pid)
        run = measured.run(
            OPERATOR,
            count,
            lambda: submit(
                bench,
                count,
                existing_claims=scenario.existing_claims,
                interval=scenario.interval,
            ),
            dict,
        )
        return (
            replace(run, resync_writes=_writes_after_restart(bench, operator))
            if resync
            else run
        )


def _writes_after_restart(bench: BenchCluster, operator: OperatorProcess) -> int:
    """Restart the operator, which lists everything, and return the number of its writes."""
    operator.wait_idle()
    operator.stop()
    restarted = time.time()
    operator.start()
    operator.wait_ready()
    operator.wait_idle()
    time.sleep(RESYNC_SECONDS)
    requests = count_requests(bench.audit_log, "operator", restarted)
    report_progress(f"requests after a restart: {dict(requests.of_account)}")
    return requests.own_writes


def _observer(
    bench: BenchCluster, count: int, *, with_pipelines: bool
) -> "AbstractContextManager[subprocess.Popen[str]]":
    options = ["--pipelines"] if with_pipelines else []
    arguments = [
        str(bench.kubeconfig("observer")),
        str(count),
        str(bench.folder / OBSERVED),
        *options,
    ]
    return running_module("observer", *arguments)


def wait_observed(
    bench: BenchCluster, observer: "subprocess.Popen[str]", count: int
) -> Object:
    """Wait for the observer's file and return its content. The observer runs on, so that its CPU can be read."""
    file = bench.folder / OBSERVED
    deadline = time.monotonic() + 60 + count * len(STAGES) * SECONDS_PER_STAGE
    while not file.exists():
        assert observer.poll() is None, "the observer ended without a result"
        assert time.monotonic() < deadline, f"{count} pipelines were not done in time"
        time.sleep(0.05)
    observed: Object = json.loads(file.read_text())
    return observed


@dataclass(frozen=True)
class Measurement:
    """The measured process, and the cluster that it works on."""

    bench: BenchCluster
    account: str
    pid: int

    def run(
        self,
        variant: str,
        count: int,
        work: Callable[[], float],
        result: Callable[[], dict[str, float]],
    ) -> Run:
        """Start the work, wait until everything is done, and return the figures."""
        idle = memory_mib(self.pid, "VmRSS")
        with _observer(
            self.bench, count, with_pipelines=variant == OPERATOR
        ) as observer:
            programs = {
                **cluster_programs(self.bench.provider.folder),
                os.getpid(): "user",
            }
            account = CpuAccount(
                {**programs, self.pid: "measured", observer.pid: "observer"}
            )
            since = time.time()
            began = time.monotonic()
            account.start()
            started = work()
            reported = result()
            observed = wait_observed(self.bench, observer, count)
            cpu, foreign = account.read(time.monotonic() - began)
        observed |= {
            "started": started,
            "ended": max(observed["finished"].values(), default=0.0),
        } | reported
        requests = count_requests(self.bench.audit_log, self.account, since)
        memory = {
            "rss_idle": round(idle, 1),
            "rss_peak": round(memory_mib(self.pid, "VmHWM"), 1),
        }
        return _figures(
            variant,
            observed,
            cpu,
            requests,
            pipelines=count,
            foreign_share=foreign,
            **memory,
        )


def _figures(
    variant: str,
    observed: Object,
    cpu: dict[str, float],
    requests: Requests,
    *,
    pipelines: int,
    **others: float,
) -> Run:
    jobs = sum(len(stages) for stages in observed["created"].values())
    makespan = observed["ended"] - observed["started"]
    last_pod = max(
        seen for stages in observed["podSucceeded"].values() for seen in stages.values()
    )
    firsts = [
        1000 * (stages[STAGES[0]] - observed["started"])
        for stages in observed["created"].values()
    ]
    hand_overs = transitions(observed["podSucceeded"], observed["created"])
    return Run(
        variant=variant,
        pipelines=pipelines,
        succeeded=observed["succeeded"]
        if variant == OPERATOR
        else len(observed["complete"]),
        jobs=jobs,
        stages_per_second=round(jobs / makespan, 2),
        makespan=round(makespan, 2),
        pods_makespan=round(last_pod - observed["started"], 2),
        first_job=percentiles(firsts),
        from_pod=percentiles(hand_overs),
        prompt=share_below(hand_overs, PROMPT_MS),
        from_complete=percentiles(
            transitions(observed["complete"], observed["created"])
        ),
        cpu=cpu,
        cpu_ms_per_stage=round(1000 * cpu["measured"] / jobs, 2),
        all_writes=round(requests.all_writes / pipelines, 1),
        own={
            key: round(number / pipelines, 2)
            for key, number in sorted(requests.of_account.items())
        },
        errors=dict(requests.errors),
        by_agent={
            agent: {
                verb: round(number / pipelines, 2)
                for verb, number in sorted(verbs.items())
            }
            for agent, verbs in sorted(requests.by_agent.items())
        },
        **others,  # type: ignore[arg-type]  # memory and foreign load
    )


def transitions(
    done: dict[str, dict[str, float]], created: dict[str, dict[str, float]]
) -> list[float]:
    """Return the milliseconds from the end of each stage to the next stage's Job, of all pipelines."""
    return [
        1000 * (created[name][following] - stages[stage])
        for name, stages in done.items()
        for stage, following in pairwise(STAGES)
        if stage in stages and following in created.get(name, {})
    ]


def share_below(values: list[float], limit: float) -> float:
    """Return the share of the values that are below the limit; 1 without values."""
    below = sum(value < limit for value in values)
    return round(below / len(values), 4) if values else 1.0


def percentiles(values: list[float]) -> list[int]:
    """Return p50, p95 and p99 by the nearest rank."""
    ordered = sorted(values)
    return [
        round(ordered[math.ceil(len(ordered) * share) - 1])
        for share in (0.50, 0.95, 0.99)
    ]
