"""Keep the memory that training frees at each step for the next one."""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3), from glibc's malloc.h."""
LARGEST = 2**31 - 1
"""Bytes: mallopt takes an int."""
CHOSEN_BY_USER = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}
"""Environment variables in which a user sets the same."""


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory, unless the user has set that; do nothing with another C library.

    By default it returns large blocks to the kernel, which clears their pages when the next step asks for them. PyTorch
    keeps no memory of its own on a CPU. The process then holds its peak until it ends.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not CHOSEN_BY_USER & os.environ.keys():
        mallopt(M_TRIM_THRESHOLD, LARGEST)
        mallopt(M_MMAP_THRESHOLD, LARGEST)
