"""Kill a child process when its parent ends, even if the parent is killed with SIGKILL. Linux only.

As a script, `parent_death.py PARENT COMMAND…` replaces itself with the command. On other systems, kill the
process group of the parent instead.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that the kernel sends this process when its parent ends. It survives execve."""


def die_with_parent() -> None:
    """Make the kernel send SIGKILL to this process when its parent ends; do nothing outside Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(parent: int, command: list[str]) -> None:
    """Replace this process with the command; `parent` is the process id of the expected parent."""
    die_with_parent()
    # Check after prctl: a parent that ended before that call sends no signal.
    if os.getppid() == parent:
        os.execvp(command[0], command)  # noqa: S606  an argument list, no shell


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
