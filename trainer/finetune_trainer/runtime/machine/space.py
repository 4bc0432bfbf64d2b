"""A disk that is full, and what a user can do about it."""

import errno
import os

from finetune_trainer.contract import Environment
from finetune_trainer.contract.environment import MANIFEST_DIR

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a write to a full disk, or beyond a quota."""


def more_space(environment: Environment | None = None) -> str:
    """Return how a user gets more space for the workspace: on a cluster, its volume can grow."""
    # Only a local run has a folder with its manifest.
    is_local = bool(os.environ.get(MANIFEST_DIR))
    if environment is not None:
        is_local = environment.manifest_dir is not None
    if is_local:
        return "free some space"
    return "enlarge spec.workspace.size, or free some space"
