"""Measure how many stages a second can be offered before the hand-over to the next stage is late.

    python bench/offered_load.py [--rates 1,2,4,8,12] [--seconds 60] [--json FILE]

bench/control_plane.py creates all pipelines at once, so its hand-overs wait in a queue of its own making. A platform
team has another question: pipelines come one after the other, so many stages a second; is the operator idle when a
stage ends? Here a pipeline of four stages is created every 4 / RATE seconds, for the given time. The
control plane and the simulated nodes are the same as in bench/control_plane.py, and so is what it needs.

A hand-over is the time from a pod seen as Succeeded to the next stage's Job. Prints for each rate the share of the
hand-overs below a second, and the seconds from the last pipeline's creation to the end of all: if these grow with the
rate, the machine does not keep up. `busy` is the CPU time of all programs in the run, divided by its time and by the
processors.
"""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from figures import add_json_option, print_table, table, write_figures  # noqa: E402
from operator_bench.api import STAGES  # noqa: E402
from operator_bench.runs import OPERATOR, Run, Scenario, run_variant  # noqa: E402
from processes import machine_facts, report_progress  # noqa: E402

COLUMNS = (
    "offered stages/s",
    "pipelines",
    "hand-over ms p50/p95/p99",
    "below 1 s",
    "end after the last creation s",
    "busy",
    "foreign load",
)


NO_BODIES = Path(os.devnull)
"""Only a null operator needs the bodies of Jobs."""


def rates(text: str) -> list[float]:
    """Return the numbers of a list separated by commas."""
    return [float(part) for part in text.split(",")]


def measure(rate: float, seconds: float) -> Run:
    """Return the figures of a run that offers this many stages a second for this many seconds."""
    interval = len(STAGES) / rate
    count = max(1, round(seconds / interval))
    scenario = Scenario(workers=None, existing_claims=True, interval=interval)
    run = run_variant(OPERATOR, count, scenario, NO_BODIES, resync=False)
    assert run.succeeded == count, f"{run.succeeded} of {count} pipelines succeeded"
    report_progress(f"{rate:g} stages/s: {run.from_pod} ms")
    return run


def row(rate: float, run: Run) -> list[str]:
    """Return the cells of a rate."""
    last_creation = (run.pipelines - 1) * len(STAGES) / rate
    busy = sum(run.cpu.values()) / run.makespan / (os.cpu_count() or 1)
    return [
        f"{rate:g}",
        str(run.pipelines),
        " / ".join(str(value) for value in run.from_pod),
        f"{100 * run.prompt:.1f} %",
        f"{run.makespan - last_creation:.1f}",
        f"{100 * busy:.0f} %",
        f"{100 * run.foreign_share:.0f} %",
    ]


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rates",
        type=rates,
        default=[1, 2, 4, 8, 12],
        help="stages a second, with commas",
    )
    parser.add_argument(
        "--seconds", type=float, default=60, help="how long each rate is offered"
    )
    add_json_option(parser)
    return parser.parse_args(arguments)


def main() -> None:
    """Run the benchmark and print its table."""
    options = options_of()
    print(", ".join(f"{name}: {value}" for name, value in machine_facts().items()))
    runs = [measure(rate, options.seconds) for rate in options.rates]
    rows = [row(rate, run) for rate, run in zip(options.rates, runs, strict=True)]
    columns = list(COLUMNS)
    print_table(columns, rows)
    tables = [table(columns, rows)]
    figures = {"tables": tables, "runs": [run.as_json() for run in runs]}
    write_figures(options.json, figures)


if __name__ == "__main__":
    main()
