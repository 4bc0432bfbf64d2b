"""A folder for the caches of libraries, for a user who may not write to the usual folder."""

import os
import stat
import tempfile
from pathlib import Path

from finetune_trainer.contract.environment import CACHES

TRITON = "TRITON_HOME"
"""Environment variable: the folder in which Triton keeps its own cache, by default the home."""
OWN = stat.S_IRWXU


def provide_cache_folder() -> None:
    """Set another folder for caches if this process may not write to the usual folder.

    Call it before libraries are imported: they read the variables then. The home stays, because users keep files there.
    """
    # An unknown home raises no error here, and the path still begins with ~.
    usual = os.environ.get(CACHES) or os.path.expanduser("~/.cache")  # noqa: PTH111
    if _can_be_written(Path(usual)):
        return
    folder = _own_folder()
    os.environ[CACHES] = folder
    os.environ.setdefault(TRITON, folder)


def _can_be_written(folder: Path) -> bool:
    """Return whether the folder can be made and written."""
    if not folder.is_absolute():
        return False
    # Path.exists() raises PermissionError below a folder that this user may not enter.
    while not os.access(folder, os.F_OK) and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


def _own_folder() -> str:
    """Return a temporary folder that only this user may write: the same for all processes of the user."""
    folder = Path(tempfile.gettempdir(), f"finetune-cache-{os.geteuid()}")
    folder.mkdir(mode=OWN, exist_ok=True)
    about = folder.lstat()
    # Anyone may create a folder of this name, and then change what libraries read from it.
    is_own = about.st_uid == os.geteuid() and stat.S_ISDIR(about.st_mode)
    if is_own and stat.S_IMODE(about.st_mode) == OWN:
        return str(folder)
    return tempfile.mkdtemp(prefix=f"{folder.name}-")
