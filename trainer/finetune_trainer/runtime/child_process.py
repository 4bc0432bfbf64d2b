"""Child processes that end with this process, however it ends."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from finetune_trainer import parent_death

PACKAGES = Path(parent_death.__file__).parent.parent
"""The folder from which this process has its own code."""


def ending_with_this_process(command: Sequence[str]) -> list[str]:
    """Return the command whose process the kernel kills when this process ends."""
    # -P: Python must not import from the working directory, where a file could shadow a library.
    return [sys.executable, "-P", parent_death.__file__, str(os.getpid()), *command]


def start_module(
    module: str, *arguments: str, variables: Mapping[str, str], pipes: int | None = None
) -> subprocess.Popen[bytes]:
    """Start a module of this program as a child; `pipes` is for its stdin and stdout.

    Without `pipes`, the child shares stdin and stdout. It gets a session of its own: a signal to the group of this
    process is for this process alone.
    """
    # First, so that the child has the same version of the code as this process.
    paths = [str(PACKAGES)]
    inherited = os.environ.get("PYTHONPATH")
    if inherited:
        paths.append(inherited)
    return subprocess.Popen(
        ending_with_this_process([sys.executable, "-P", "-m", module, *arguments]),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | dict(variables),
        stdin=pipes,
        stdout=pipes,
        start_new_session=True,
    )
