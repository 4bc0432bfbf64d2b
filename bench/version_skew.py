"""Two versions of the operator beside each other, as in an upgrade: the Lease leaves its holder in each stage.

    python bench/version_skew.py --previous REVISION [--lives 4]

The previous version is a Git revision of this repository, the other version is this checkout, with its CRD. In
each life one pipeline runs five stages, with an eviction and an edit, and loses its leader in each. The final status
and the stages that ran must equal the stages of a life with this version alone. Prints the differences; exits with 1 if
there are any.
"""

import argparse
import asyncio
import logging
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack, closing
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "operator"),
    str(ROOT / "trainer"),
    str(ROOT / "tests"),
]

from support.faults.lease import add_standby, steal_lease  # noqa: E402
from support.faults.life import Outcome, a_life  # noqa: E402
from support.faults.manifest import STAGES  # noqa: E402
from support.faults.operators import OperatorForks  # noqa: E402
from support.faults.simulation import PLANE, Simulation, simulation  # noqa: E402
from support.operator.operator_process import install_crd  # noqa: E402

from figures import add_json_option, write_figures  # noqa: E402
from testcluster import fixtures  # noqa: E402


async def live(
    simulated: Simulation,
    namespace: str,
    first: OperatorForks,
    second: OperatorForks | None,
) -> Outcome:
    """Run one life with the first version, and a standby of the second."""
    await simulated.create_namespace(namespace)
    async with AsyncExitStack() as stack:
        life = await stack.enter_async_context(
            a_life(simulated, namespace, "demo", forks=first)
        )
        if second:
            await add_standby(stack, life, forks=second)
            life.hooks = dict.fromkeys(STAGES, lambda _pod: steal_lease(life))
        outcome = await life.run()
    await simulated.delete_namespace(namespace)
    return outcome


async def live_all(
    kubeconfig: Path, previous: OperatorForks, current: OperatorForks, lives: int
) -> list[str]:
    """Run all lives at once, and return how they differ from the life of one version."""
    with tempfile.TemporaryDirectory() as folder:
        async with simulation(kubeconfig, current, Path(folder)) as simulated:
            pairs = [
                (previous, current) if number % 2 else (current, previous)
                for number in range(lives)
            ]
            alone, *skewed = await asyncio.gather(
                live(simulated, "alone", current, None),
                *(
                    live(simulated, f"skewed-{number}", *pair)
                    for number, pair in enumerate(pairs)
                ),
            )
    texts = [
        difference(f"skewed-{number}", alone, outcome)
        for number, outcome in enumerate(skewed)
    ]
    return [text for text in texts if text]


def difference(name: str, alone: Outcome, skewed: Outcome) -> str:
    """Return how the end of a life differs from the end of a life with one version, or an empty string."""
    if skewed == alone:
        return ""
    return f"{name}: {skewed}\ninstead of {alone}"


def git(*arguments: str) -> None:
    """Run git in this repository."""
    subprocess.run(["git", *arguments], cwd=ROOT, check=True)  # noqa: S607  the user's git


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--previous", required=True, help="revision of the other version"
    )
    parser.add_argument("--lives", type=int, default=4)
    add_json_option(parser)
    chosen = parser.parse_args()
    logging.getLogger("aiohttp.server").setLevel(
        logging.CRITICAL
    )  # connections of killed replicas
    with (
        tempfile.TemporaryDirectory() as folder,
        fixtures.cluster("skew", "none", control_plane=PLANE) as cluster,
    ):
        checkout = Path(folder) / "previous"
        git("worktree", "add", "--detach", str(checkout), chosen.previous)
        try:
            install_crd(cluster.kube)
            with (
                closing(OperatorForks(checkout)) as previous,
                closing(OperatorForks()) as current,
            ):
                differences = asyncio.run(
                    live_all(cluster.kubeconfig, previous, current, chosen.lives)
                )
        finally:
            git("worktree", "remove", "--force", str(checkout))
    print(
        "\n".join(differences)
        or f"{chosen.lives} lives ended as the life of one version"
    )
    figures = {"lives": chosen.lives, "differences": differences}
    write_figures(chosen.json, figures)
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main())
