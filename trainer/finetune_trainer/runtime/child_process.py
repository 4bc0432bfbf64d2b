"""Child processes that end with this one, however it ends."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from finetune_trainer import parent_death

PACKAGES = Path(parent_death.__file__).parent.parent
"""The folder from which this process has its own code."""


def ending_with_this_process(command: Sequence[str]) -> list[str]:
    """Return the command whose process the kernel kills when this one ends."""
    return [sys.executable, "-P", parent_death.__file__, str(os.getpid()), *command]


def start_module(
    module: str, *arguments: str, variables: Mapping[str, str], pipes: int | None = None
) -> subprocess.Popen[bytes]:
    """Start a module of this program as a child; `pipes` is for its stdin and stdout, which it shares without.

    It gets a session of its own: a signal to the group of this process is for this process alone.
    """
    paths = [str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        ending_with_this_process([sys.executable, "-P", "-m", module, *arguments]),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | dict(variables),
        stdin=pipes,
        stdout=pipes,
        start_new_session=True,
    )
