"""Measure the operator's memory with thousands of pipelines, its restart among them, and its growth over time.

    python bench/operator_memory.py [--pipelines 1000,5000] [--running 50] [--churn MINUTES] [--json FILE]

It needs what `make cluster` needs: Linux, root, and the programs of testcluster. The control plane is that of
bench/control_plane.py; each number of pipelines has a fresh one. One pipeline is run by the operator. The finished ones
are copies of it: real custom resources, Jobs and pods, created while the Job controller and kwok are stopped
(bench/operator_bench/finished_pipelines.py). The running ones are started by the operator and stay in train.

Then a stage ends while the operator is stopped. The time from the operator's start to the next Job is measured. The
operator's writes are printed. It must write nothing for finished pipelines. After the restart it writes for that one
pipeline only: its Jobs of evaluate and push, and its status.

--churn creates, finishes and deletes pipelines for this long, samples the resident memory each second, and prints the
slope by least squares in MiB/h. The first fifth of the samples is left out. With --pipelines 0 it runs alone.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from operator_bench.churn import ChurnRun, measure_churn  # noqa: E402
from operator_bench.cluster import cluster  # noqa: E402
from operator_bench.memory_runs import MemoryRun, measure  # noqa: E402
from processes import machine_facts  # noqa: E402


def report(run: MemoryRun) -> str:
    """Return the figures of one number of pipelines as text."""
    return f"""
{run.pipelines} pipelines, {run.running} of them running:
  RSS without pipelines {run.rss_empty:.1f} MiB, after one has run {run.rss_one:.1f} MiB
  RSS with all, idle {run.rss_loaded:.1f} MiB: {run.rss_per_1000:.1f} MiB per 1,000 pipelines
  RSS after a restart {run.rss_restarted:.1f} MiB, peak {run.peak_restarted:.1f} MiB
  CPU while idle {run.idle_cpu_percent:.1f} % of one processor
  restart: ready after {run.seconds_to_ready:.1f} s, first transition after {run.seconds_to_transition:.1f} s
  writes on first seeing the finished ones: {run.copies_writes}
  writes after the restart: {run.restart_writes}"""


def report_churn(run: ChurnRun) -> str:
    """Return the figures of a churn as text."""
    first, last = run.samples[0][1], run.samples[-1][1]
    return f"""
churn of {run.minutes:g} min, {run.pipelines} pipelines created, finished and deleted:
  RSS {first:.1f} MiB at the start, {last:.1f} MiB at the end, slope {run.slope:+.2f} MiB/h"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pipelines", default="1000,5000", help="numbers of pipelines, with commas; 0: none"
    )
    parser.add_argument("--running", type=int, default=50, help="how many of them run")
    parser.add_argument(
        "--churn", type=float, metavar="MINUTES", help="also measure the growth for this long"
    )
    parser.add_argument(
        "--in-flight", type=int, default=20, help="pipelines that run at a time in the churn"
    )
    parser.add_argument("--workers", type=int, help="--workers of the operator (default: its own)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    facts, found = machine_facts(), {"pipelines": [], "churn": []}
    print(", ".join(f"{name}: {value}" for name, value in facts.items()))
    for count in filter(None, map(int, options.pipelines.split(","))):
        with tempfile.TemporaryDirectory() as folder, cluster(Path(folder)) as bench:
            run = measure(bench, count, options.running, options.workers)
        print(report(run), flush=True)
        found["pipelines"].append(asdict(run))
    if options.churn:
        with tempfile.TemporaryDirectory() as folder, cluster(Path(folder)) as bench:
            churn = measure_churn(bench, options.churn, options.in_flight, options.workers)
        print(report_churn(churn))
        found["churn"].append(asdict(churn))
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, **found}, indent=1))


if __name__ == "__main__":
    main()
