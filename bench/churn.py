"""A day in an hour: pipelines are changed at random while the connection to the API server fails at random.

    python bench/churn.py [--minutes 60] [--pipelines 200] [--seed 1]

Creates a cluster of a control plane only, whose pods are simulated. Users start, edit, suspend, cancel, delete and
re-create pipelines. Pods are evicted, interrupted and fail. Requests of the operator are refused, delayed and cut, and
its watches end in every way. Then the faults stop. Each pipeline must reach the state that a small model of the
specification predicts (tests/support/faults/churn_model.py), and nothing may be left over.

Prints the memory of the operator over time. Exits with 1 where a pipeline is in another state, an object has leaked,
or two pods ever had one claim.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "operator"), str(ROOT / "trainer"), str(ROOT / "tests")]

from support.faults.churn import Report, churn  # noqa: E402
from support.faults.operators import OperatorForks  # noqa: E402
from support.faults.simulation import PLANE  # noqa: E402
from support.operator.operator_process import install_crd  # noqa: E402

from testcluster import fixtures  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--pipelines", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    with (
        fixtures.cluster("churn", "none", control_plane=PLANE) as cluster,
        tempfile.TemporaryDirectory() as folder,
    ):
        install_crd(cluster.kube)
        forks = OperatorForks()
        run = churn(
            cluster.kubeconfig,
            forks,
            Path(folder),
            pipelines=chosen.pipelines,
            seconds=chosen.minutes * 60,
            seed=chosen.seed,
        )
        try:
            return print_report(asyncio.run(run))
        finally:
            forks.close()


def print_report(report: Report) -> int:
    """Print what happened and return the exit code."""
    print(f"actions: {dict(report.actions)}; processes of stages: {report.processes}")
    print(f"settled {report.settled_seconds:.0f} s after the last fault")
    for title, found in (
        ("in another state", report.wrong),
        ("leaked", report.leaked),
        ("two writers, or repeated", report.problems),
    ):
        print(f"{title}: {len(found)}")
        print("".join(f"  {one}\n" for one in found), end="")
    return int(bool(report.wrong or report.leaked or report.problems))


if __name__ == "__main__":
    sys.exit(main())
