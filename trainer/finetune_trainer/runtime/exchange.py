"""The atomic exchange of two names, which Python does not have."""

import ctypes
import os
from pathlib import Path

# Constants of the C headers fcntl.h and stdio.h, which Python does not have.
AT_FDCWD = -100
RENAME_EXCHANGE = 2
"""Flag of Linux's renameat2(2)."""
RENAME_SWAP = 2
"""Flag of macOS's renamex_np(2)."""


def exchange(first: Path, second: Path) -> bool:
    """Exchange two names atomically; return False if the operating system or the file system cannot."""
    library = ctypes.CDLL(None)
    first_name = os.fsencode(first)
    second_name = os.fsencode(second)
    # Linux with glibc 2.28 or musl 1.2.5.
    if hasattr(library, "renameat2"):
        result = library.renameat2(
            AT_FDCWD, first_name, AT_FDCWD, second_name, RENAME_EXCHANGE
        )
        return bool(result == 0)
    # macOS.
    if hasattr(library, "renamex_np"):
        return bool(library.renamex_np(first_name, second_name, RENAME_SWAP) == 0)
    return False
