"""Measure the operator beside thousands of finished pipelines: its memory, and how soon a new leader acts.

    python bench/stored_pipelines.py [--pipelines 20000] [--json FILE]

It needs what `make cluster` needs: Linux, root, and the programs of testcluster. etcd and kube-apiserver are real; no
controller acts on Jobs. One pipeline of the test corpus, with its four Jobs and its claim, is stored by the API server
and reconciled by the operator. All others are copies of these objects in etcd (operator_bench/etcd_copies.py).

Then the operator is stopped, a pipeline is created, and the operator is started again. Printed are the times from the
start of the process until /readyz answers and until that pipeline has its first Job, and the delay from the creation of
a second pipeline, 3 s after the start, to its first Job. Memory is resident memory in MiB: the peak, and at the end,
when all finished pipelines have been reconciled. The operator must write nothing for finished pipelines.
"""

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parent.parent
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "operator"),
    str(ROOT / "trainer"),
    str(ROOT / "tests"),
]

from support.faults.api import Api, Endpoint  # noqa: E402
from support.operator.stored_pipelines import (  # noqa: E402
    BARE,
    StoredPipeline,
    store,
    stored_pipelines,
)

from figures import add_json_option, write_figures  # noqa: E402
from operator_bench.api import CLAIMS, JOBS, NAMESPACE, PIPELINE, PIPELINES  # noqa: E402
from operator_bench.audit import WRITES, count_requests  # noqa: E402
from operator_bench.cluster import BenchCluster, cluster  # noqa: E402
from operator_bench.operator_process import OperatorProcess  # noqa: E402
from operator_bench.pipelines import pipeline  # noqa: E402
from processes import (  # noqa: E402
    cluster_programs,
    cpu_seconds,
    machine_facts,
    memory_mib,
    report_progress,
)

TEMPLATE = "finished-000000"
STATE = "without-deploy"
"""Pipeline of the corpus that is copied: four stages have succeeded."""
WAITS = "waits-000001"
LATER = "later-000001"
SECOND_AFTER = 3.0
"""Seconds from the start of the process to the creation of the second pipeline."""
PATIENCE = 600.0
QUIET_CPU = 0.15
"""Share of one processor below which the API server counts as idle."""
QUIET_SECONDS = 3.0
CACHED = re.compile(
    r'^finetune_cache_objects\{kind="(\w+)"\} ([\d.e+]+)$', re.MULTILINE
)
POLL_SECONDS = 0.05
T = TypeVar("T")


@dataclass(frozen=True)
class Figures:
    """Memory in MiB, times in seconds."""

    pipelines: int
    objects_each: int
    seconds_to_ready: float
    seconds_to_first_job: float
    cpu_to_first_job: float
    """CPU seconds of the operator until then, which other load on the machine changes little."""
    seconds_to_job_of_second: float
    peak: float
    resident: float
    seconds_to_idle: float
    """From the start until the operator has listed all objects and uses no CPU."""
    writes: dict[str, int]
    """Writes of the restarted operator; all belong to the two new pipelines."""


def ask(bench: BenchCluster, work: Callable[[Api], Awaitable[T]]) -> T:
    """Call `work` with a client of the API server, and return its result."""
    endpoint = Endpoint.read(bench.provider.kubeconfig)

    async def run() -> T:
        async with endpoint.session() as session:
            return await work(Api(endpoint, session))

    return asyncio.run(run())


def fill(bench: BenchCluster, count: int) -> int:
    """Store one finished pipeline, let the operator see it, and copy it; return the number of objects of each."""
    entries = stored_pipelines(100)
    [entry] = [stored.entry for stored in entries if stored.name == f"{STATE}-8"]
    ask(bench, lambda api: store(api, NAMESPACE, [StoredPipeline(TEMPLATE, entry)]))
    operator = OperatorProcess(bench)
    operator.start()
    operator.wait_ready()
    operator.wait_idle()
    operator.stop()
    uids = ask(bench, uids_of_template)
    programs = cluster_programs(bench.provider.folder)
    [etcd] = [pid for pid, name in programs.items() if name == "etcd"]
    module = [sys.executable, "-m", "operator_bench.etcd_copies"]
    enter = ["nsenter", f"--net=/proc/{etcd}/ns/net"]
    arguments = [NAMESPACE, TEMPLATE, str(count), *uids]
    done = subprocess.run(
        [*enter, *module, *arguments],
        cwd=ROOT / "bench",
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return int(done.stdout)


async def uids_of_template(api: Api) -> list[str]:
    """Return the uids of the stored pipeline, of its Jobs and of its claim."""
    stored = await api.send("GET", f"{PIPELINES}/{TEMPLATE}")
    children = [*await api.list(JOBS), *await api.list(CLAIMS)]
    named = [item for item in children if item["metadata"]["name"].startswith(TEMPLATE)]
    return [item["metadata"]["uid"] for item in (stored, *named)]


async def create(api: Api, name: str) -> None:
    """Create a pipeline with a workspace of its own."""
    await api.send("POST", PIPELINES, pipeline(name, None))


def wait_first(bench: BenchCluster, operator: OperatorProcess) -> tuple[float, float]:
    """Wait for the Job of the pipeline that waited; return the seconds since the start, and the operator's CPU."""
    at = ask(bench, lambda api: wait_job(api, WAITS))
    return at - operator.started, cpu_seconds(operator.pid)


async def wait_job(api: Api, name: str) -> float:
    """Wait for the first Job of a pipeline; return the time, by the monotonic clock."""
    query = {"labelSelector": f"{PIPELINE}={name}", "limit": "1"}
    async with asyncio.timeout(PATIENCE):
        while not await api.list(JOBS, **query):  # noqa: ASYNC110  the API server is asked
            await asyncio.sleep(POLL_SECONDS)
    return time.monotonic()


def measure(bench: BenchCluster, count: int) -> Figures:
    """Fill a control plane, and measure a restart of the operator among its pipelines."""
    objects = fill(bench, count)
    report_progress(f"{count} finished pipelines of {objects} objects are stored")
    wait_quiet(bench)
    report_progress("the API server has read them")
    ask(bench, lambda api: create(api, WAITS))
    began = time.time()
    operator = OperatorProcess(bench)
    operator.start()
    with ThreadPoolExecutor(2) as pool:
        ready = pool.submit(operator.wait_ready)
        first = pool.submit(wait_first, bench, operator)
        time.sleep(SECOND_AFTER)
        ask(bench, lambda api: create(api, LATER))
        created = time.monotonic()
        second = ask(bench, lambda api: wait_job(api, LATER))
        to_ready = ready.result()
        to_first, cpu = first.result()
    report_progress("both new pipelines have a Job")
    wait_complete(operator, count)
    idle = time.monotonic() - operator.started
    requests = count_requests(bench.audit_log, "operator", began)
    figures = Figures(
        pipelines=count,
        objects_each=objects,
        seconds_to_ready=to_ready,
        seconds_to_first_job=to_first,
        cpu_to_first_job=cpu,
        seconds_to_job_of_second=second - created,
        peak=memory_mib(operator.pid, "VmHWM"),
        resident=memory_mib(operator.pid, "VmRSS"),
        seconds_to_idle=idle,
        writes=writes_of(requests.of_account),
    )
    operator.stop()
    return figures


def wait_quiet(bench: BenchCluster) -> None:
    """Wait until the API server, which watches etcd, uses little CPU."""
    programs = cluster_programs(bench.provider.folder)
    [server] = [pid for pid, name in programs.items() if name == "kube-apiserver"]
    used = QUIET_CPU
    while used >= QUIET_CPU:
        before = cpu_seconds(server)
        time.sleep(QUIET_SECONDS)
        used = (cpu_seconds(server) - before) / QUIET_SECONDS


def wait_complete(operator: OperatorProcess, count: int) -> None:
    """Wait until the cache has all pipelines and their Jobs, and the operator is idle."""
    deadline = time.monotonic() + PATIENCE
    cached: dict[str, float] = {}
    while cached.get("finetunepipelines", 0) <= count or cached.get("jobs", 0) <= count:
        assert time.monotonic() < deadline, f"the cache has only {cached}"
        time.sleep(1)
        cached = cached_objects(operator.port)
    operator.wait_idle(PATIENCE)


def cached_objects(port: int) -> dict[str, float]:
    """Return the number of cached objects of each kind, from /metrics."""
    address = f"http://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(address, timeout=30) as response:
        text = response.read().decode()
    return {kind: float(value) for kind, value in CACHED.findall(text)}


def writes_of(requests: Counter[str]) -> dict[str, int]:
    """Return the requests that change something."""
    return {key: number for key, number in requests.items() if key.split()[0] in WRITES}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pipelines", type=int, default=20_000)
    add_json_option(parser)
    options = parser.parse_args()
    facts = machine_facts()
    print(", ".join(f"{name}: {value}" for name, value in facts.items()))
    with (
        tempfile.TemporaryDirectory() as folder,
        cluster(Path(folder), flags=BARE.flags, kwok_nodes=0) as bench,
    ):
        figures = measure(bench, options.pipelines)
    for name, value in asdict(figures).items():
        shown = f"{value:.1f}" if isinstance(value, float) else value
        print(f"{name.replace('_', ' ')}: {shown}")
    write_figures(options.json, asdict(figures))


if __name__ == "__main__":
    main()
