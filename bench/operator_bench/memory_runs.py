"""Memory of the operator with many pipelines, and its restart among them."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from operator_bench.api import JOBS, PIPELINE, PODS, STAGE, Api, Object, condition, open_api
from operator_bench.audit import WRITES, count_requests
from operator_bench.cluster import BenchCluster
from operator_bench.finished_pipelines import Template, create_finished, read_template
from operator_bench.operator_process import OperatorProcess, running_module, running_operator
from operator_bench.pipelines import claim_name, pipeline, pipeline_name
from operator_bench.runs import OBSERVED, wait_observed
from operator_bench.user import create_claims, create_pipelines, prepare_claims, submit
from processes import cpu_seconds, report_progress

HELD = "train"
"""The stage in which the running pipelines stay. Its pod runs until this benchmark ends it."""
NEXT = "evaluate"
IDLE_WINDOW = 20.0
"""Seconds over which the CPU of an operator without changes is measured."""
POLL_SECONDS = 0.05
TIMEOUT = 300.0


@dataclass(frozen=True)
class MemoryRun:
    """Figures for one number of pipelines. Memory is in MiB, times are in seconds."""

    pipelines: int
    running: int
    rss_empty: float
    """Without any pipeline."""
    rss_one: float
    """After one pipeline has run."""
    rss_loaded: float
    """All pipelines exist, and nothing changes."""
    rss_per_1000: float
    """(rss_loaded - rss_empty) for each 1,000 pipelines."""
    rss_restarted: float
    """The same pipelines after another restart, when the operator is idle again."""
    peak_restarted: float
    """Largest memory of the restarted process, while it lists all objects."""
    seconds_to_ready: float
    """From the restart until /readyz answers."""
    seconds_to_transition: float
    """From the restart to the next Job of a pipeline whose stage ended while the operator was stopped."""
    idle_cpu_percent: float
    """CPU of the idle operator, in percent of one processor."""
    copies_writes: dict[str, int]
    """Writes of an operator that first sees the finished pipelines: none, if they are as it would have left them."""
    restart_writes: dict[str, int]
    """Writes of the restarted operator by resource; all belong to the pipeline whose stage ended."""


def measure(bench: BenchCluster, count: int, running: int, workers: int | None) -> MemoryRun:
    """Fill a fresh control plane with pipelines; measure the operator among them."""
    rss_empty, rss_one, template = _run_one(bench, workers)
    report_progress("one pipeline has run")
    create_finished(bench, template, 1 + running, count - running - 1)
    report_progress("the finished pipelines are created")
    began = time.time()
    with running_operator(bench, workers) as operator:
        operator.wait_idle()
        copies_writes = _writes(bench, began)
        report_progress(f"the operator is idle beside them: {operator.rss:.1f} MiB")
        _ask(bench, lambda api: _start_held(api, running))
        operator.wait_idle()
        report_progress("the others run")
        rss_loaded, cpu = operator.rss, _idle_cpu(operator)
        operator.stop()
        _ask(bench, lambda api: _end_pod(api, template, pipeline_name(1)))
        report_progress("a stage has ended beside no operator")
        restarted = time.time()
        operator.start()
        with ThreadPoolExecutor(1) as pool:
            ready = pool.submit(operator.wait_ready)
            to_transition = _ask(
                bench, lambda api: _wait_transition(api, pipeline_name(1), operator)
            )
            to_ready = ready.result()
        operator.wait_idle()
        report_progress("the restarted operator is idle")
        return MemoryRun(
            pipelines=count,
            running=running,
            rss_empty=rss_empty,
            rss_one=rss_one,
            rss_loaded=rss_loaded,
            rss_per_1000=(rss_loaded - rss_empty) / count * 1000,
            rss_restarted=operator.rss,
            peak_restarted=operator.peak,
            seconds_to_ready=to_ready,
            seconds_to_transition=to_transition,
            idle_cpu_percent=cpu,
            copies_writes=copies_writes,
            restart_writes=_writes(bench, restarted),
        )


def _writes(bench: BenchCluster, since: float) -> dict[str, int]:
    """Return the operator's writes since this time by resource."""
    requests = count_requests(bench.audit_log, "operator", since)
    return {key: number for key, number in requests.of_account.items() if key.split()[0] in WRITES}


def _run_one(bench: BenchCluster, workers: int | None) -> tuple[float, float, Template]:
    """Run the pipeline number 0; return the memory before and after it, and its objects."""
    prepare_claims(bench, 1, existing=True)
    arguments = [
        str(bench.kubeconfig("observer")),
        "1",
        str(bench.folder / OBSERVED),
        "--pipelines",
    ]
    with (
        running_operator(bench, workers) as operator,
        running_module("observer", *arguments) as observer,
    ):
        operator.wait_idle()
        empty = operator.rss
        submit(bench, 1, existing_claims=True)
        wait_observed(bench, observer, 1)
        operator.wait_idle()
        return empty, operator.rss, _ask(bench, lambda api: read_template(api, pipeline_name(0)))


def _ask(bench: BenchCluster, work: Callable[[Api], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with open_api(bench.kubeconfig("user"), "bench-user") as api:
            return await work(api)

    return asyncio.run(run())


def _idle_cpu(operator: OperatorProcess) -> float:
    before = cpu_seconds(operator.pid)
    time.sleep(IDLE_WINDOW)
    return 100 * (cpu_seconds(operator.pid) - before) / IDLE_WINDOW


async def _start_held(api: Api, count: int) -> None:
    """Start pipelines 1 to `count`, and wait until each has a running pod in the held stage."""
    names = [pipeline_name(number) for number in range(1, count + 1)]
    await create_claims(api, names)
    await create_pipelines(api, (pipeline(name, claim_name(name), hold=HELD) for name in names))
    query = {"labelSelector": f"{STAGE}={HELD}", "fieldSelector": "status.phase=Running"}
    async with asyncio.timeout(TIMEOUT):
        while len((await api.list(PODS, **query))[0]) < count:  # noqa: ASYNC110  the API server is asked
            await asyncio.sleep(1)


async def _end_pod(api: Api, template: Template, name: str) -> None:
    """Make the held pod of a pipeline succeed with a valid result, and wait until its Job is Complete."""
    query = {"labelSelector": f"{PIPELINE}={name},{STAGE}={HELD}"}
    pod = (await api.list(PODS, **query))[0][0]
    message, identity = template.termination_message(HELD)
    own_identity = pod["metadata"]["labels"]["finetune.dev/identity"]
    await api.send(
        "PATCH",
        f"{PODS}/{pod['metadata']['name']}/status",
        {"status": _succeeded(pod["status"], message.replace(identity, own_identity))},
        "merge-patch+json",
    )
    async with asyncio.timeout(TIMEOUT):
        while not condition((await api.list(JOBS, **query))[0][0], "Complete"):  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)


def _succeeded(status: Object, message: str) -> Object:
    container: Object = json.loads(json.dumps(status["containerStatuses"][0]))
    started = container["state"]["running"]["startedAt"]
    ended = {
        "exitCode": 0,
        "reason": "Completed",
        "startedAt": started,
        "finishedAt": started,
        "message": message,
    }
    container |= {"ready": False, "started": False, "state": {"terminated": ended}}
    return {"phase": "Succeeded", "containerStatuses": [container]}


async def _wait_transition(api: Api, name: str, operator: OperatorProcess) -> float:
    """Wait for the Job after the held stage; return the seconds since the operator's start."""
    query = {"labelSelector": f"{PIPELINE}={name},{STAGE}={NEXT}"}
    async with asyncio.timeout(TIMEOUT):
        while not (await api.list(JOBS, **query))[0]:  # noqa: ASYNC110  the API server is asked
            await asyncio.sleep(POLL_SECONDS)
    return time.monotonic() - operator.started
