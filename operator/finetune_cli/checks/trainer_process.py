"""Starts programs of the trainer that look at what a manifest names, and reads their answers."""

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

# With -P: a file of the current folder, such as json.py, must not take the place of a module.
# Not isolated (-I): the process must find the same packages as this process.
COMMAND = (sys.executable, "-P", "-m")
# A program ends by itself before that, unless the machine is overloaded.
LONGEST_SECONDS = 240.0
"""Longest time for an answer."""


def ask(
    module: str, request: Any, environment: Mapping[str, str]
) -> list[dict[str, Any]] | None:
    """Return the JSON lines that a program writes for a request on stdin; None if it fails.

    It fails if the trainer's packages are not installed.
    """
    process = run_module(module, json.dumps(request), environment, LONGEST_SECONDS)
    if process is None or process.returncode:
        return None
    return [json.loads(line) for line in process.stdout.splitlines()]


def run_module(
    module: str, text: str, environment: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[str] | None:
    """Run a program of the trainer with a text on stdin; None if it does not start, or takes longer than `seconds`."""
    try:
        return subprocess.run(
            (*COMMAND, module),
            input=text,
            capture_output=True,
            text=True,
            timeout=seconds,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
