"""Keep the memory that a training step frees for the next step."""

import ctypes
import os

# Parameters of mallopt(3), from glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
NEVER = -1
"""Threshold at which malloc never returns memory."""
CHOSEN_BY_USER = {
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
}
"""Environment variables by which a user decides about freed memory; GLIBC_TUNABLES is another."""


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory until the process ends; do nothing with another C library.

    glibc returns large blocks to the kernel, which must clear each page before the next step can have it. PyTorch
    keeps no memory of its own on a CPU. A user's setting of malloc stays as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    has_variable = not CHOSEN_BY_USER.isdisjoint(os.environ)
    is_chosen = has_variable or "glibc.malloc." in tunables
    if mallopt is not None and not is_chosen:
        mallopt(M_TRIM_THRESHOLD, NEVER)
        # No block has a mapping of its own. M_MMAP_THRESHOLD would not do: before glibc 2.35 it ends at 32 MiB.
        mallopt(M_MMAP_MAX, 0)
