"""`python -m e2e [PYTEST ARGUMENTS]`: the tests that need a control plane or nodes, with all that they need."""

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
"""It counts all that is on the machine: nobody else may make clusters meanwhile."""
XDIST_ARGUMENTS = ("--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder", "-v")
"""The others mostly wait, so two go on side by side, each with a cluster of its own; a file stays in one lane."""


def main(arguments: list[str]) -> int:
    """Prepare and test. A machine that cannot is told so in one loud line; where CI=true that is a failure."""
    try:
        prepare()
    except UsageError as problem:
        print(f"\n*** SKIPPED: {' and '.join(LAYERS)} (real Kubernetes): {problem}\n", file=sys.stderr)
        return int(os.environ.get("CI", "") in {"true", "1"})
    except TimedOut as problem:
        print(f"e2e: {problem}", file=sys.stderr)
        return 1
    if any(not argument.startswith("-") for argument in arguments):
        return _test(*arguments)
    return max(
        _test(SERIAL_TESTS, *arguments), _test(*XDIST_ARGUMENTS, f"--ignore={SERIAL_TESTS}", *LAYERS, *arguments)
    )


def prepare() -> None:
    """Have programs and images, made side by side: images want the disk and the network, programs the cores."""
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
