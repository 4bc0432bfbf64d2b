"""What the operator's `Auto` costs beside other policies and the offline optimum, on traces of spot capacity.

    python bench/spot.py [--traces 150] [--seed 3] [--family NAME ...] [--trace FILE] [--picture FILE.svg] [--json FILE]

For each of eight families of traces (bench/spot_bench/traces.py: shapes and sources), jobs of 1 to 48 hours with a
deadline of 1.1 to 3 times that (jobs.py) run minute by minute under each policy:

- Auto: the functions of finetune_operator.core.capacity.policy, called as the operator calls them. It learns of spot
  capacity only by an attempt that waits or is taken;
- Auto with a probe: the same, but it waits for a spot node beside a running attempt on on-demand nodes;
- Uniform Progress and greedy (Wu et al., NSDI'24). They see for free at each minute whether there is spot capacity;
- always spot, for ever, and always on-demand;
- the optimum: dynamic programming over each minute, which knows the future (optimum.py).

With --trace, jobs start at random moments of the trace in a file instead: CSV with the columns start, end (hours) and
available (0 or 1), or JSON of github.com/skypilot-org/spot-traces.

Prints for each family the ratio of the cost to the optimum, median and 95th percentile of the runs that meet their
deadline, and how many miss it. All deadlines are feasible. The goal for Auto is 1.1, 1.25 and 0. The last row, "dear
spot", has an A100's prices, of which spot is the higher one; it is not part of "all".

Then prints what the best of all plans costs that start on spot nodes only if the deadline could be kept after an
eviction, which no policy that never misses can do without. And, for jobs without a deadline, cost and time of Auto
beside always on-demand. Exits with 1 if a policy meets a deadline for less than the optimum, which would be a mistake.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "operator"), str(ROOT / "trainer")]

from figures import add_json_option, print_table, table, write_figures  # noqa: E402
from spot_bench.auto import auto_without_deadline  # noqa: E402
from spot_bench.jobs import DEAR_SPOT, Job, draw_job  # noqa: E402
from spot_bench.optimum import optimum  # noqa: E402
from spot_bench.picture import draw  # noqa: E402
from spot_bench.policies import POLICIES  # noqa: E402
from spot_bench.simulation import start  # noqa: E402
from spot_bench.traces import FAMILIES, Trace, generate, read_trace  # noqa: E402

DEAR = "dear spot"
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Result:
    """One job on one trace: the cost of each policy by the cost of the optimum, or None if it misses the deadline."""

    family: str
    ratios: dict[str, float | None]
    safe: float
    """Cost of the optimum that could meet the deadline after an eviction at any time, divided by the optimum's."""
    free_cost: float
    """Cost of Auto without a deadline, divided by the cost of always on-demand."""
    free_time: float
    """Time of Auto without a deadline, divided by the time of always on-demand."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=int, default=150, help="traces of each family")
    parser.add_argument(
        "--seed", type=int, default=3, help="1 and 2 are those that Auto was tuned with"
    )
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--trace", type=Path, help="a trace of your own")
    parser.add_argument("--picture", type=Path)
    add_json_option(parser)
    chosen = parser.parse_args()
    drawn = (
        from_file(chosen.trace, chosen.traces, chosen.seed)
        if chosen.trace
        else from_families(chosen.family, chosen.traces, chosen.seed)
    )
    results = [measure(family, job, trace) for family, job, trace in drawn]
    columns, *rows = table_of(results)
    print_table(columns, rows)
    print_bounds(results)
    write_figures(chosen.json, {"tables": [table(columns, rows)]})
    if chosen.picture:
        chosen.picture.write_text(draw(summaries(results)))
    return print_mistakes(results)


def from_families(
    families: list[str], traces: int, seed: int
) -> Iterator[tuple[str, Job, Trace]]:
    """Yield jobs with generated traces, the same for the same seed."""
    for family in families:
        for number in range(traces):
            rng = np.random.default_rng([seed, list(FAMILIES).index(family), number])
            trace = generate(family, rng)
            yield family, draw_job(rng), trace
    for number in range(max(1, traces // 5)):
        rng = np.random.default_rng([seed, len(FAMILIES), number])
        yield DEAR, draw_job(rng, DEAR_SPOT[1]), generate("volatile", rng)


def from_file(file: Path, jobs: int, seed: int) -> Iterator[tuple[str, Job, Trace]]:
    """Yield jobs that start at random moments of a trace."""
    trace = read_trace(file)
    for number in range(jobs):
        rng = np.random.default_rng([seed, number])
        yield (
            trace.family,
            draw_job(rng),
            replace(trace, begin=int(rng.integers(trace.length))),
        )


def measure(family: str, job: Job, trace: Trace) -> Result:
    """Run a job under each policy."""
    lowest = optimum(job, trace)
    ratios = {}
    for name, policy in POLICIES.items():
        run = start(job, trace)
        policy(run)
        ratios[name] = None if run.is_late else run.cost / lowest
    free = start(job, trace)
    auto_without_deadline(free)
    safe = optimum(job, trace, reserve=2 * job.restart + job.checkpoint) / lowest
    return Result(
        family,
        ratios,
        safe,
        free.cost / job.on_demand_cost(),
        free.now / (job.work + job.restart),
    )


Summary = tuple[float, float, int]
"""Median and 95th percentile of the ratios of runs that meet their deadline, and the number of those that do not."""


def summaries(results: list[Result]) -> dict[str, dict[str, Summary]]:
    """Return family -> policy -> summary; the first family is "all"."""
    families = {"all": [result for result in results if result.family != DEAR]}
    for result in results:
        families.setdefault(result.family, []).append(result)
    return {
        family: {
            name: summary([result.ratios[name] for result in chosen])
            for name in POLICIES
        }
        for family, chosen in families.items()
    }


def summary(ratios: list[float | None]) -> Summary:
    """Return the summary of one policy's ratios."""
    kept = [ratio for ratio in ratios if ratio is not None] or [np.nan]
    return (
        float(np.median(kept)),
        float(np.percentile(kept, 95)),
        sum(ratio is None for ratio in ratios),
    )


def table_of(results: list[Result]) -> list[list[str]]:
    """Return the ratios as rows of cells; the first row has the names of the policies."""
    rows = [["median, p95, missed", *POLICIES]]
    for family, by_policy in summaries(results).items():
        count = sum(
            family in ("all", result.family)
            and (family == DEAR or result.family != DEAR)
            for result in results
        )
        cells = [
            f"{median:.2f}, {p95:.2f}, {missed}"
            for median, p95, missed in by_policy.values()
        ]
        rows.append([f"{family} ({count})", *cells])
    return rows


def print_bounds(results: list[Result]) -> None:
    """Print what safety costs the optimum, and what Auto costs and how long it takes without a deadline."""
    chosen = [result for result in results if result.family != DEAR]
    for title, values in (
        (
            "optimum that is safe from evictions / optimum: cost",
            [result.safe for result in chosen],
        ),
        (
            "Auto without a deadline / always on-demand: cost",
            [result.free_cost for result in chosen],
        ),
        (
            "Auto without a deadline / always on-demand: time",
            [result.free_time for result in chosen],
        ),
    ):
        middle, high = np.percentile(values, [50, 95])
        print(f"{title} {middle:.2f} (median), {high:.2f} (p95)")


def print_mistakes(results: list[Result]) -> int:
    """Print each case in which a policy beats the optimum, and return the exit code."""
    wrong = [
        f"{result.family}: {name} costs {ratio} of the optimum"
        for result in results
        for name, ratio in result.ratios.items()
        if ratio is not None and ratio < 1 - TOLERANCE
    ]
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
