"""Run as a script, `leash.py PARENT COMMAND…`: becomes the command, which then ends when its parent does.

Even when the parent is killed with SIGKILL, on Linux. Elsewhere the parent's process group has to be killed.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Replace this process by the command."""
    library = ctypes.CDLL(None)
    if hasattr(library, "prctl"):
        library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:  # else it ended before the line above
        os.execvp(command[0], command)  # noqa: S606  an argument list, no shell


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
