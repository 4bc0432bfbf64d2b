"""The Hugging Face hub as a source of models and data sets: hf://ORG/NAME[@REVISION][/PATH].

The pin is a commit. Files in LFS have a SHA-256. Small files have a git object id, which `download` verifies.
"""

import hashlib
import shutil
import time
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

import httpx2
from huggingface_hub import get_hf_file_metadata, get_session, hf_raise_for_status
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import HfFileMetadata, xet_get
from huggingface_hub.hf_api import RepoFile

# Private, because huggingface_hub.utils exports it at run time only: type checkers do not find it there.
from huggingface_hub.utils._headers import build_hf_headers

# Private, because the library exports no way to ask whether it would use xet. It depends on an installed package and on
# HF_HUB_DISABLE_XET.
from huggingface_hub.utils._runtime import is_xet_available

from finetune_trainer.contract.environment import has_wildcard
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    DataInvalid,
    ServiceUnavailable,
    SourceNotFound,
)
from finetune_trainer.stores.hub.cached import is_offline
from finetune_trainer.stores.hub.client import (
    TEMPORARY_STATUSES,
    HubRepository,
    HubUri,
    RepositoryType,
)
from finetune_trainer.stores.hub.splits import files_of_split
from finetune_trainer.stores.port import Listing, RemoteFile

# Only fruitless tries count: a large file may come with any number of broken connections.
FRUITLESS_TRIES = 4
"""Tries of a download that may end in a row without a byte more."""
WAIT_SECONDS = 1.0
"""Wait after the first fruitless try; each further try doubles it."""


class HubSource:
    """A model or a data set of the hub, or the part of it that the URI's path names.

    The path is a file, a folder, or a folder and a pattern for the names in it (`train-*.parquet`). For a data set
    without a path, `config` and `split` select the files as the library `datasets` does.
    """

    def __init__(
        self,
        uri: str,
        kind: RepositoryType,
        revision: str | None = None,
        *,
        config: str | None = None,
        split: str | None = None,
    ) -> None:
        """Raise ConfigInvalid if the URI or its combination with the other fields is invalid."""
        parts = HubUri.parse(uri)
        if parts.revision and revision and parts.revision != revision:
            raise ConfigInvalid(
                f"{uri}: names the revision {parts.revision}, but revision is {revision}; remove one"
            )
        if (config or split) and (parts.path or kind == "model"):
            raise ConfigInvalid(
                f"{uri}: config and split select files of hf://ORG/NAME; remove them, or the path"
            )
        if has_wildcard(parts.path.rpartition("/")[0]):
            raise ConfigInvalid(
                f"{uri}: only the last part of the path may be a pattern; name the folder"
            )
        self.uri = uri
        # Downloads are kept under this name. Two splits of one repository are different downloads.
        chosen = [f"config {config}"] if config else []
        if split:
            chosen.append(f"split {split}")
        if chosen:
            self.uri = f"{uri} ({', '.join(chosen)})"
        self.config = config
        self.split = split
        self._repository = HubRepository(uri, parts.name, kind)
        self._revision = parts.revision or revision
        self._path = parts.path
        self._listed: dict[str, str] = {}
        """Path in the repository of each listed file, by name."""
        self._commit: str | None = None

    def list_files(self, pin: str | None) -> Listing:
        """Return the files at the present commit of the revision, or at the pin. See `StoreSource.list_files`."""
        with self._repository.errors():
            try:
                commit = pin or self._repository.commit_of(self._revision)
                entries = dict(self._named_files(commit))
            except RevisionNotFoundError as error:
                if pin is None:
                    raise
                raise DataInvalid(
                    f"{self.uri}: the hub no longer has the commit {pin}; start again from its present files"
                ) from error
        if not entries:
            raise SourceNotFound(
                f"{self.uri}: {self._repository.page} has no such file at {commit}; correct the path"
            )
        self._commit = commit
        self._listed = {}
        files = []
        for name, entry in sorted(entries.items()):
            self._listed[name] = entry.path
            files.append(_remote_file(name, entry))
        # The Hugging Face cache may have only some of the files.
        return Listing(commit, tuple(files), partial=is_offline())

    def _named_files(self, commit: str) -> list[tuple[str, RepoFile]]:
        """Return the files that the path names, with their names below it."""
        if not self._path:
            entries = list(self._repository.files(commit))
            if self._repository.type == "dataset":
                entries = self._of_split(commit, entries)
            return [(entry.path, entry) for entry in entries]
        folder, _, last = self._path.rpartition("/")
        # Only the listing of the folder shows whether the last part of the path is a file or a folder.
        siblings = self._files_below(commit, folder, recursive=False)
        matching = [entry for entry in siblings if _matches(entry, last)]
        if matching or has_wildcard(last):
            return [(_last_segment(entry), entry) for entry in matching]
        below = self._files_below(commit, self._path, recursive=True)
        prefix = f"{self._path}/"
        return [(entry.path.removeprefix(prefix), entry) for entry in below]

    def _files_below(
        self, commit: str, folder: str, *, recursive: bool
    ) -> list[RepoFile]:
        try:
            return list(self._repository.files(commit, folder, recursive=recursive))
        except EntryNotFoundError:
            return []

    def _of_split(self, commit: str, entries: list[RepoFile]) -> list[RepoFile]:
        names = {entry.path for entry in entries}
        readme = ""
        if "README.md" in names:
            readme = self._repository.read("README.md", commit).decode(errors="replace")
        uri = self._repository.uri
        chosen = files_of_split(uri, names, readme, self.config, self.split)
        return [entry for entry in entries if entry.path in chosen]

    def download(self, file: RemoteFile, path: Path) -> None:
        """Write a listed file to `path`. See `StoreSource.download`.

        A file in the Hugging Face cache is copied. A large file continues behind its bytes, also if xet's client wrote
        them, in their order. A small file starts again. Raise ServiceUnavailable, and remove
        `path`, if a small file does not have its git object id.
        """
        if self._commit is None:
            raise TypeError("download comes after list_files")
        blob = self._repository.cached.blob(file.sha256 or file.version, file.size)
        with self._repository.errors():
            if blob is not None:
                shutil.copyfile(blob, path)
                return
            name = self._listed.get(file.name, file.name)
            url = self._repository.url(name, self._commit)
            metadata = self._metadata(url, file)
            # A file without SHA-256 is small, and only this method verifies it. Its part may be spoilt.
            if file.sha256 is None:
                path.write_bytes(b"")
            # xet's client cannot continue a part, and an empty file needs no client.
            is_new = _size(path) == 0
            is_empty = file.size == 0
            can_use_xet = is_new and not is_empty and is_xet_available()
            xet_file = metadata.xet_file_data
            if xet_file is not None and can_use_xet:
                xet_get(
                    incomplete_path=path,
                    xet_file_data=xet_file,
                    headers=build_hf_headers(),
                    expected_size=file.size,
                )
            else:
                self._download_by_range(url, file, path)
        if file.sha256 is None:
            self._check_git_object_id(file, path)

    def _check_git_object_id(self, file: RemoteFile, path: Path) -> None:
        """Raise ServiceUnavailable, and remove the file, if it does not have the listed object id."""
        object_id = git_object_id(path)
        if object_id != file.version:
            path.unlink()
            raise ServiceUnavailable(
                f"{self.uri}: {file.name} came with the git object id {object_id}, expected {file.version}; retry"
            )

    def _metadata(self, url: str, file: RemoteFile) -> HfFileMetadata:
        """Return the hub's metadata of a file; raise DataInvalid if it describes another file than the listing."""
        try:
            metadata = get_hf_file_metadata(
                url, endpoint=self._repository.endpoint, retry_on_errors=True
            )
        except (RevisionNotFoundError, EntryNotFoundError) as error:
            raise DataInvalid(
                f"{self.uri}: the hub no longer has {file.name} of {self._commit}; start again from its present files"
            ) from error
        if metadata.etag not in {file.version, file.sha256}:
            raise DataInvalid(
                f"{self.uri}: {file.name} is {metadata.etag}, expected {file.sha256 or file.version}; "
                "start again from its present files"
            )
        return metadata

    def _download_by_range(self, url: str, file: RemoteFile, path: Path) -> None:
        """Download a file with as many requests as it takes, while each brings some bytes."""
        fruitless = 0
        before = _size(path)
        while before != file.size:
            try:
                _receive(url, path, file.size)
            except (httpx2.TransportError, HfHubHTTPError) as error:
                if not _is_temporary(error):
                    raise
                if _size(path) > before:
                    fruitless = 0
                else:
                    fruitless += 1
                if fruitless == FRUITLESS_TRIES:
                    raise
                if fruitless:
                    time.sleep(WAIT_SECONDS * 2 ** (fruitless - 1))
            before = _size(path)


def _is_temporary(error: httpx2.TransportError | HfHubHTTPError) -> bool:
    """Return whether the same request may succeed later."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in TEMPORARY_STATUSES
    return True


def _receive(url: str, path: Path, size: int | None) -> None:
    """Append to `path` the missing bytes of a file of `size` bytes; start again if it has more."""
    start = _size(path)
    if size is not None and start > size:
        path.unlink()
        start = 0
    # Offsets and sizes count the stored bytes, so the server must not compress them.
    headers = build_hf_headers() | {
        "Range": f"bytes={start}-",
        "Accept-Encoding": "identity",
    }
    with get_session().stream("GET", url, headers=headers) as response:
        hf_raise_for_status(response)
        # A server that knows no ranges answers 200 with the whole file.
        mode = "ab" if response.status_code == httpx2.codes.PARTIAL_CONTENT else "wb"
        with path.open(mode) as output:
            for data in response.iter_raw():
                received = output.tell() + len(data)
                # Such a server could fill the disk.
                if size is not None and received > size:
                    raise DataInvalid(
                        f"{url}: the hub sends more than the {size:,} bytes that it lists; use another hub"
                    )
                output.write(data)


def _size(path: Path) -> int:
    if not path.exists():
        return 0
    return path.stat().st_size


def _last_segment(entry: RepoFile) -> str:
    return PurePosixPath(entry.path).name


def _matches(entry: RepoFile, pattern: str) -> bool:
    name = _last_segment(entry)
    # A name may itself contain characters that have a meaning in patterns, such as brackets.
    return name == pattern or fnmatchcase(name, pattern)


def _remote_file(name: str, entry: RepoFile) -> RemoteFile:
    # Only files in LFS have a SHA-256 at the hub.
    sha256 = entry.lfs.sha256 if entry.lfs else None
    return RemoteFile(name, entry.size, entry.blob_id, sha256)


def git_object_id(path: Path) -> str:
    """Return the object id that git has for the content of a file: SHA-1 over a header and the bytes."""
    # git names objects by SHA-1. Here it finds damage of a transfer, and protects from nothing.
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while data := file.read(1024 * 1024):
            digest.update(data)
    return digest.hexdigest()
