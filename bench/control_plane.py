"""Measure what the operator adds to a control plane, beside a null operator that only creates the same Jobs.

    python bench/control_plane.py [--pipelines 20,100,500] [--runs 3] [--json FILE] [--resync-check] [--claims created]

It needs what `make cluster` needs: Linux, root, and the programs of testcluster. etcd, kube-apiserver,
kube-controller-manager and scheduler are real. The nodes are simulated by kwok: each pod runs one second and leaves a
valid result. A run creates N pipelines of four stages at once and ends when all have succeeded.

Every run has a fresh control plane, so that no run works beside the finished objects of another. Variants take turns:

- operator: this checkout's `python -m finetune_operator`, driven by its custom resource;
- null-complete: creates the next Job when a Job is Complete (bench/operator_bench/null_operator.py);
- null-pod: creates the next Job when a pod has succeeded.

A null operator creates the same Jobs as the operator. It sends the bodies that a first run captured. A pipeline ends
when its condition Finished is seen, or when a null operator has seen the end of its last stage.

Each pipeline has its own workspace, a claim that is bound before the run. With --claims created, the operator and the
null operators create it in the run. The scheduler then rejects a pod whose claim is not bound yet, and retries it after
a second or more: the sooner the first Job comes, the later its pod may start.

Prints medians and, in brackets, minimum and maximum of the runs. Transitions are measured by one observing process.
Runs beside more than 15 % foreign load are marked in the table.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from figures import add_json_option, print_table, table, write_figures  # noqa: E402
from operator_bench.audit import WRITES  # noqa: E402
from operator_bench.runs import (  # noqa: E402
    OPERATOR,
    VARIANTS,
    Run,
    Scenario,
    capture_bodies,
    run_variant,
)
from processes import FOREIGN_SHARE, machine_facts, report_progress  # noqa: E402


def counts(text: str) -> list[int]:
    """Return the numbers of a list separated by commas."""
    return [int(part) for part in text.split(",")]


def spread(values: list[float], digits: int = 1) -> str:
    """Return median, minimum and maximum as text."""
    middle = statistics.median(values)
    low = min(values)
    high = max(values)
    return (
        f"{middle:.{digits}f}"
        if low == high
        else f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"
    )


def requests(run: Run, *verbs: str) -> float:
    """Return the measured program's requests per pipeline with these verbs."""
    return sum(count for key, count in run.own.items() if key.split()[0] in verbs)


def quantiles(runs: list[Run], field: Callable[[Run], list[int]]) -> str:
    """Return the medians of p50, p95 and p99."""
    return " / ".join(
        f"{statistics.median(field(run)[index] for run in runs):.0f}"
        for index in range(3)
    )


ROWS: dict[str, Callable[[list[Run]], str]] = {
    "stages/s": lambda runs: spread([run.stages_per_second for run in runs]),
    "makespan s": lambda runs: spread([run.makespan for run in runs]),
    "until last pod s": lambda runs: spread([run.pods_makespan for run in runs]),
    "first Job ms p50/p95/p99": lambda runs: quantiles(runs, lambda run: run.first_job),
    "pod done -> next Job ms": lambda runs: quantiles(runs, lambda run: run.from_pod),
    "Complete -> next Job ms": lambda runs: quantiles(
        runs, lambda run: run.from_complete
    ),
    "own CPU ms/stage": lambda runs: spread([run.cpu_ms_per_stage for run in runs]),
    "all CPU ms/stage": lambda runs: spread(
        [1000 * sum(run.cpu.values()) / run.jobs for run in runs]
    ),
    "RSS peak MiB": lambda runs: spread([run.rss_peak for run in runs], 0),
    "own writes": lambda runs: spread([requests(run, *WRITES) for run in runs]),
    "GET": lambda runs: spread([requests(run, "get") for run in runs]),
    "LIST": lambda runs: spread([requests(run, "list") for run in runs], 2),
    "WATCH": lambda runs: spread([requests(run, "watch") for run in runs], 2),
    "all writes": lambda runs: spread([run.all_writes for run in runs]),
    "foreign load": lambda runs: (
        spread([100 * run.foreign_share for run in runs], 0) + " %" + marked(runs)
    ),
}
"""Requests are per pipeline, without requests for Leases."""


def marked(runs: list[Run]) -> str:
    """Return a mark if a run had too much foreign load to count."""
    return " !" if any(run.foreign_share > FOREIGN_SHARE for run in runs) else ""


def table_of(count: int, runs: list[Run]) -> list[list[str]]:
    """Return the figures of all variants for one number of pipelines as rows of cells; the first has the variants."""
    by_variant = {
        variant: [run for run in runs if run.variant == variant] for variant in VARIANTS
    }
    groups = [group for group in by_variant.values() if group]
    heading = f"{count} pipelines, {len(groups[0])} runs"
    rows = [[heading, *(group[0].variant for group in groups)]]
    for title, cell in ROWS.items():
        rows.append([title, *(cell(group) for group in groups)])
    rows.append(["stages/s, operator / variant", *ratios(groups)])
    return rows


def ratios(groups: list[list[Run]]) -> list[str]:
    """Return the throughput of the operator divided by the throughput of each variant in the same turn."""
    own = [group for group in groups if group[0].variant == OPERATOR]
    if not own:
        return [""] * len(groups)
    return [ratio(own[0], group) for group in groups]


def ratio(own: list[Run], others: list[Run]) -> str:
    """Return the ratio of two throughputs over the turns; empty for the operator itself."""
    if own is others:
        return ""
    pairs = zip(own, others, strict=True)
    return spread([a.stages_per_second / b.stages_per_second for a, b in pairs], 2)


def details(run: Run) -> str:
    """Return the requests of one run per pipeline, by program, and the requests of the operator by resource."""
    by_agent = "\n".join(f"  {agent}: {verbs}" for agent, verbs in run.by_agent.items())
    return f"{run.variant}, requests per pipeline:\n{by_agent}\n  own by resource: {run.own}\n  errors: {run.errors}"


def measure(
    options: argparse.Namespace, count: int, scenario: Scenario, bodies: Path
) -> list[Run]:
    """Run all variants in turns; each turn begins with another variant."""
    runs = []
    for turn in range(options.runs):
        start = turn % len(options.variants)
        for variant in (*options.variants[start:], *options.variants[:start]):
            resync = options.resync_check and turn == 0
            run = run_variant(variant, count, scenario, bodies, resync=resync)
            assert run.succeeded == count, (
                f"{variant}: {run.succeeded} of {count} pipelines succeeded"
            )
            report_progress(
                f"{count} {variant}: {run.stages_per_second} stages/s, {run.makespan} s"
            )
            runs.append(run)
    return runs


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pipelines",
        type=counts,
        default=[20, 100, 500],
        help="numbers of pipelines, with commas",
    )
    parser.add_argument(
        "--runs", type=int, default=3, help="runs of each variant for each number"
    )
    parser.add_argument(
        "--variants", type=lambda text: text.split(","), default=list(VARIANTS)
    )
    parser.add_argument(
        "--workers", type=int, help="--workers of the operator (default: its own)"
    )
    parser.add_argument(
        "--claims",
        choices=("existing", "created"),
        default="existing",
        help="see above",
    )
    parser.add_argument(
        "--resync-check",
        action="store_true",
        help="restart the operator; it must write nothing",
    )
    add_json_option(parser)
    return parser.parse_args(arguments)


def main() -> None:
    """Run the benchmark, and exit with 1 if a restarted operator wrote anything."""
    options = options_of()
    facts = machine_facts()
    runs = []
    tables = []
    print(", ".join(f"{name}: {value}" for name, value in facts.items()))
    with tempfile.TemporaryDirectory() as folder:
        bodies = Path(folder) / "bodies.json"
        scenario = Scenario(
            options.workers, existing_claims=options.claims == "existing"
        )
        capture_bodies(scenario, bodies)
        for count in options.pipelines:
            measured = measure(options, count, scenario, bodies)
            columns, *rows = table_of(count, measured)
            print()
            print_table(columns, rows)
            tables.append(table(columns, rows))
            runs += measured
    for variant in options.variants:
        print(details([run for run in runs if run.variant == variant][-1]))
    figures = {"tables": tables, "runs": [run.as_json() for run in runs]}
    write_figures(options.json, figures)
    resynced = [run.resync_writes for run in runs if run.resync_writes is not None]
    if resynced:
        print(f"writes of a restarted operator with all pipelines finished: {resynced}")
    sys.exit(int(any(resynced)))


if __name__ == "__main__":
    main()
