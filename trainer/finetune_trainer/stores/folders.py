"""Targets in folders: pvc:// and file://.

A target T has a folder `T/sha256-HEX/` for each model, and the link `T/latest` to the newest.
"""

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from finetune_trainer.files import (
    SUFFIX_PATTERN,
    UNKNOWN_TO_FILE_SYSTEM,
    sync_folder,
    temporary_name,
)
from finetune_trainer.runtime.artifacts import (
    MANIFEST,
    CorruptArtifact,
    atomic_folder,
    complete_replacement,
    files_in,
    remove_leftovers,
    verify,
)
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    Interrupted,
    MachineUnable,
)
from finetune_trainer.runtime.locks import locked
from finetune_trainer.sizes import format_size
from finetune_trainer.stop_signal import stop
from finetune_trainer.stores.port import Publication
from finetune_trainer.stores.publications import (
    LATEST,
    Entries,
    check_was_pushed,
    folder_name,
    sealed_entries,
    without_card,
)

# Locks, unfinished folders and links, and the folder that ext4 creates in a new volume.
HIDDEN = (".sha256-", f".{LATEST}.", "lost+found")
"""Beginnings of names that are no models."""
# Another attempt would get these errors, too, so they are no reason to retry.
FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
"""Errors of a folder that this user may not write."""
NO_LINKS = UNKNOWN_TO_FILE_SYSTEM | {
    errno.EXDEV,
    errno.EPERM,
    errno.EMLINK,
    errno.EACCES,
}
"""Errors of a hard link for which a copy is made: another file system, or a limit of this file system."""


class FolderTarget:
    """A folder to publish models to.

    A model appears with one rename, and `latest` changes with a second rename. A server that reads `latest` or a digest
    therefore never sees half a model. Folders of earlier digests stay.
    """

    def __init__(self, uri: str, path: Path) -> None:
        self.uri = uri
        self._path = path

    def check(self) -> None:
        """Raise ConfigInvalid if the target holds files that no push wrote. See `StoreTarget.check`."""
        if self._path.exists():
            with self._disk_errors(0):
                self._check_was_pushed()

    def publish(self, folder: Path, digest: str, names: Sequence[str]) -> Publication:
        """Publish the files of a sealed folder as `T/sha256-HEX/`, then make it the latest.

        Files are hard links if the file system allows them, else copies. Raise ConfigInvalid if the target holds
        files that no push wrote, MachineUnable if the disk is full, and Interrupted between two files inside
        `stop.deferred()`.
        """
        local = sealed_entries(folder, names)
        size = sum(size for size, _ in local.values())
        name = folder_name(digest)
        with self._disk_errors(size):
            self._check_was_pushed()
            self._remove_leftovers()
            sent = 0
            if not self._is_intact(name, local):
                self._write(folder, name, names)
                sent = size
            # Last: until then, `latest` names a model that is whole.
            self._switch(name)
        return Publication(f"{self.uri.rstrip('/')}/{name}", sent)

    def _check_was_pushed(self) -> None:
        """Raise ConfigInvalid if the target holds files that no push wrote; create it if it does not exist."""
        if self._path.exists() and not self._path.is_dir():
            raise ConfigInvalid(
                f"push.targets {self.uri}: {self._path} is no folder; choose another target"
            )
        self._path.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in self._path.iterdir()}
        shown = {name for name in names if not name.startswith(HIDDEN)}
        check_was_pushed(self.uri, shown)
        latest = self._path / LATEST
        # Not exists, which follows the link: a user may have deleted the folder that it names.
        if os.path.lexists(latest) and not latest.is_symlink():
            raise ConfigInvalid(
                f"push.targets {self.uri}: {latest} is no link, so no push wrote it; move it"
            )

    def _remove_leftovers(self) -> None:
        """Remove the unfinished folders of killed pushes, also of models that are never pushed again."""
        for lock in self._path.glob(f".sha256-*.{SUFFIX_PATTERN}.lock"):
            unfinished = Path(lock.stem)
            model = unfinished.stem.removeprefix(".")
            remove_leftovers(self._path / model)

    def _is_intact(self, name: str, local: Entries) -> bool:
        """Return whether the model is there, with any model card. Reads every byte of it.

        Raise ConfigInvalid if there is a file that no push wrote: to write the model again would delete it.
        """
        folder = self._path / name
        # A killed push may have moved the old folder away and not yet the new folder to its place.
        complete_replacement(folder)
        files = files_in(folder)
        present = {path.relative_to(folder).as_posix() for path in files}
        foreign = present - set(local)
        if foreign:
            raise ConfigInvalid(
                f"push.targets {self.uri}: {name}/{min(foreign)} was not written by a push; move it out of the model"
            )
        try:
            verify(folder)
            return without_card(sealed_entries(folder, list(local))) == without_card(
                local
            )
        except (CorruptArtifact, ValueError):
            return False

    def _write(self, folder: Path, name: str, names: Sequence[str]) -> None:
        """Write the model under its digest."""
        with atomic_folder(self._path / name, shared=True) as temporary:
            for file in [*sorted(names), MANIFEST]:
                if stop.requested:
                    raise Interrupted
                target = temporary / file
                target.parent.mkdir(parents=True, exist_ok=True)
                _link_or_copy(folder / file, target)
            # A crash of the machine may lose names in a folder that was not flushed.
            parents = {(temporary / file).parent for file in names}
            for parent in parents:
                sync_folder(parent)

    def _switch(self, name: str) -> None:
        """Make `latest` a link to a folder, atomically; leave it if it links to that folder already."""
        latest = self._path / LATEST
        lock = self._path / f".{LATEST}.lock"
        with locked(lock, "another process that publishes there") as is_locked:
            # Without the lock, a link may be another process's that is about to rename it.
            if is_locked:
                for leftover in self._path.glob(f".{LATEST}.{SUFFIX_PATTERN}"):
                    leftover.unlink(missing_ok=True)
            if latest.is_symlink() and str(latest.readlink()) == name:
                return
            # A link cannot be changed, only replaced: a new link is renamed over the old link.
            link = temporary_name(latest)
            try:
                link.symlink_to(name)
            except OSError as error:
                if error.errno not in UNKNOWN_TO_FILE_SYSTEM | {errno.EPERM}:
                    raise
                raise ConfigInvalid(
                    f"push.targets {self.uri}: its file system has no links ({error}); use another storage class"
                ) from error
            link.replace(latest)
            sync_folder(self._path)

    @contextmanager
    def _disk_errors(self, needed: int) -> Iterator[None]:
        """Raise ConfigInvalid if the folder may not be written, MachineUnable if a write in the block fails."""
        try:
            yield
        except OSError as error:
            if error.errno in FORBIDDEN:
                raise ConfigInvalid(
                    f"push.targets {self.uri}: user {os.getuid()} may not write there: {error}; let this user write "
                    f"the folder, or choose another target; {LATEST} is unchanged"
                ) from error
            raise MachineUnable(
                f"push.targets {self.uri}: cannot write: {error}; the model has {format_size(needed)} and "
                f"{format_size(self._free_bytes())} are free; free some space and retry; {LATEST} is unchanged"
            ) from error

    def _free_bytes(self) -> int:
        # The folder may not exist yet.
        parent = self._path
        while not parent.exists():
            parent = parent.parent
        return shutil.disk_usage(parent).free


def _link_or_copy(source: Path, target: Path) -> None:
    """Create a hard link, or a durable copy if the file system cannot."""
    # A link is made at once and takes no space beside the model in the workspace.
    try:
        target.hardlink_to(source)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        shutil.copyfile(source, target)
        shutil.copymode(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())
