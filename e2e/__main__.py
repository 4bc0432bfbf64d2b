"""`python -m e2e [PYTEST ARGUMENTS]`: install what the cluster tests need, then run the integration and e2e tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from testcluster import binaries, deps
from testcluster.errors import TimedOut, UsageError
from testcluster.images import build
from testcluster.images.image_builders import ENGINES
from testcluster.kind import engine, node_image

LAYERS = ("tests/integration", "testcluster/tests/e2e", "e2e")
ARGO_CD = ("luavm", "miniredis", "argocd")
FLUX = ("source-controller", "kustomize-controller", "helm-controller")
SERIAL_TESTS = "testcluster/tests/e2e/test_cleanup.py"
"""Runs alone: it compares the machine's processes, mounts and networks, so no other test may create clusters then."""
XDIST_ARGUMENTS = (
    "--numprocesses=2",
    "--dist=loadfile",
    "--no-loadscope-reorder",
    "-v",
)
"""Two workers, each with its own cluster, because the tests mostly wait.

`loadfile` keeps the tests of a file in one worker, where they share module fixtures. `--no-loadscope-reorder` keeps the
order of files that `e2e/conftest.py` sets.
"""


def main(arguments: list[str]) -> int:
    """Build programs and images, run the tests, return the exit code.

    A machine that cannot run clusters prints one line and returns 0, or 1 if CI=true.
    """
    named = [argument for argument in arguments if not argument.startswith("-")]
    try:
        prepare(of_tests(named))
    except UsageError as error:
        print(
            f"\n*** SKIPPED: {' and '.join(LAYERS)} (real Kubernetes): {error}\n",
            file=sys.stderr,
        )
        return int(os.environ.get("CI", "") in {"true", "1"})
    except TimedOut as error:
        print(f"e2e: {error}", file=sys.stderr)
        return 1
    if named:
        return _test(*arguments)
    return max(
        _test(SERIAL_TESTS, *arguments),
        _test(*XDIST_ARGUMENTS, f"--ignore={SERIAL_TESTS}", *LAYERS, *arguments),
    )


def of_tests(named: list[str]) -> tuple[str, ...]:
    """Return the programs that only tests need and that take minutes to build, for all tests or for the named tests."""
    if named and not any("gitops" in name for name in named):
        return ()
    return ARGO_CD + (FLUX if os.environ.get("GITOPS") == "all" else ())


def prepare(for_tests: tuple[str, ...] = ()) -> None:
    """Build programs and images in parallel: images are bound by disk and network, programs by CPU.

    Programs for tests are built here, because a build in a test keeps the processors from other tests for minutes.
    Without them the other tests can run, so a test reports its missing program itself.
    """
    programs = deps.install_packages()
    with ThreadPoolExecutor() as pool:
        images = pool.submit(build.build_all)
        deps.build(programs)
        with suppress(UsageError):
            deps.build(for_tests)
        images.result()
    if os.environ.get("KIND") in {"short", "all"}:
        with suppress(UsageError):
            install_docker()
            node_image.build(binaries.report_progress)


def install_docker() -> None:
    """Install Debian's engine, which the tests on kind start, unless an engine answers. Raises UsageError."""
    if not ENGINES["docker"].is_available():
        deps.install(
            [
                package
                for package, program in engine.PACKAGES.items()
                if not shutil.which(program)
            ]
        )


def _test(*arguments: str) -> int:
    command = [sys.executable, "-m", "pytest", "--durations=15", *arguments]
    return subprocess.run(
        command, cwd=Path(__file__).parents[1], check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
