"""A child process that ends with its parent, even where the parent is killed with SIGKILL; on Linux only.

Run as a script, `parent_death.py PARENT COMMAND…`, it becomes the command. Elsewhere the parent's process group has
to be killed.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that the kernel sends this process when its parent ends; kept across execve."""


def die_with_parent() -> None:
    """Ask the kernel to send SIGKILL to this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(parent: int, command: list[str]) -> None:
    """Replace this process by the command."""
    die_with_parent()
    if os.getppid() == parent:  # else the parent ended before the line above, and nothing would end this process
        os.execvp(command[0], command)  # noqa: S606  an argument list, no shell


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
