"""`python -m e2e [PYTEST ARGUMENTS]`: install what the cluster tests need, then run the integration and e2e tests."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from testcluster import deps
from testcluster.errors import TimedOut, UsageError
from testcluster.images import build

LAYERS = ("tests/integration", "testcluster/tests/e2e", "e2e")
SERIAL_TESTS = "testcluster/tests/e2e/test_cleanup.py"
"""Runs alone: it compares the machine's processes, mounts and networks, so no other test may create clusters then."""
XDIST_ARGUMENTS = ("--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder", "-v")
"""Two workers, each with its own cluster, because the tests mostly wait.

`loadfile` keeps the tests of a file in one worker, where they share module fixtures. `--no-loadscope-reorder` keeps the
order of files that `e2e/conftest.py` sets.
"""


def main(arguments: list[str]) -> int:
    """Build programs and images, run the tests, return the exit code.

    A machine that cannot run clusters prints one line and returns 0, or 1 if CI=true.
    """
    try:
        prepare()
    except UsageError as error:
        print(f"\n*** SKIPPED: {' and '.join(LAYERS)} (real Kubernetes): {error}\n", file=sys.stderr)
        return int(os.environ.get("CI", "") in {"true", "1"})
    except TimedOut as error:
        print(f"e2e: {error}", file=sys.stderr)
        return 1
    if any(not argument.startswith("-") for argument in arguments):
        return _test(*arguments)
    return max(
        _test(SERIAL_TESTS, *arguments), _test(*XDIST_ARGUMENTS, f"--ignore={SERIAL_TESTS}", *LAYERS, *arguments)
    )


def prepare() -> None:
    """Build programs and images in parallel: images are bound by disk and network, programs by CPU."""
    programs = deps.install_packages()
    with ThreadPoolExecutor() as pool:
        images = pool.submit(build.build_all)
        deps.build(programs)
        images.result()


def _test(*arguments: str) -> int:
    command = [sys.executable, "-m", "pytest", "--durations=15", *arguments]
    return subprocess.run(command, cwd=Path(__file__).parents[1], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
