"""The Hugging Face hub as a source of models and data sets: hf://ORG/NAME[@REVISION][/PATH].

The pin is a commit. Files in LFS have a SHA-256, and small ones a git object id, which `download` verifies.
"""

import hashlib
import time
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

import httpx2
from huggingface_hub import get_hf_file_metadata, get_session, hf_raise_for_status
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RevisionNotFoundError
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
from finetune_trainer.stores.hub_client import (
    TEMPORARY_STATUSES,
    HubRepository,
    HubUri,
    RepositoryType,
)
from finetune_trainer.stores.hub_splits import files_of_split
from finetune_trainer.stores.port import Listing, RemoteFile

FRUITLESS_TRIES = 4
"""Tries of a download that may end in a row without a byte more."""
WAIT_SECONDS = 1.0
"""Wait after the first fruitless try; each further one doubles it."""


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
        chosen = ", ".join(
            f"{key} {value}" for key, value in (("config", config), ("split", split)) if value
        )
        self.uri = (
            f"{uri} ({chosen})" if chosen else uri
        )  # names the files: downloads are kept under it
        self.config, self.split = config, split
        self._repository = HubRepository(uri, parts.name, kind)
        self._revision, self._path = parts.revision or revision, parts.path
        self._listed: dict[str, str] = {}
        self._commit: str | None = None

    def list_files(self, pin: str | None) -> Listing:
        """Return the files at the commit of the revision now, or at that of the pin. See `StoreSource.list_files`."""
        with self._repository.errors():
            try:
                commit = pin or self._repository.commit_of(self._revision)
                found = dict(self._named_files(commit))
            except RevisionNotFoundError as error:
                if pin is None:
                    raise
                raise DataInvalid(
                    f"{self.uri}: the hub no longer has the commit {pin}; start again from its present files"
                ) from error
        if not found:
            raise SourceNotFound(
                f"{self.uri}: {self._repository.page} has no such file at {commit}; correct the path"
            )
        self._commit, self._listed = commit, {name: entry.path for name, entry in found.items()}
        return Listing(commit, tuple(_remote_file(name, found[name]) for name in sorted(found)))

    def _named_files(self, commit: str) -> list[tuple[str, RepoFile]]:
        """Return the files that the path names, with their names below it."""
        if not self._path:
            entries = list(self._repository.files(commit))
            if self._repository.type == "dataset":
                entries = self._of_split(commit, entries)
            return [(entry.path, entry) for entry in entries]
        *folders, last = self._path.split("/")
        folder = "/".join(folders)
        beside = [
            entry
            for entry in self._files_below(commit, folder, recursive=False)
            if _matches(entry, last)
        ]
        if beside or has_wildcard(last):
            return [(PurePosixPath(entry.path).name, entry) for entry in beside]
        below = self._files_below(commit, self._path, recursive=True)
        return [(entry.path[len(self._path) + 1 :], entry) for entry in below]

    def _files_below(self, commit: str, folder: str, *, recursive: bool) -> list[RepoFile]:
        try:
            return list(self._repository.files(commit, folder, recursive=recursive))
        except EntryNotFoundError:
            return []

    def _of_split(self, commit: str, entries: list[RepoFile]) -> list[RepoFile]:
        names = {entry.path for entry in entries}
        readme = self._repository.read("README.md", commit) if "README.md" in names else b""
        chosen = files_of_split(
            self._repository.uri, names, readme.decode(errors="replace"), self.config, self.split
        )
        return [entry for entry in entries if entry.path in chosen]

    def download(self, file: RemoteFile, path: Path) -> None:
        """Write a listed file to `path`. See `StoreSource.download`.

        A large file continues behind its bytes, also one in xet, whose client writes them in their order. A small one
        starts again. Raise ServiceUnavailable, and remove `path`, if a small file does not have its git object id.
        """
        if self._commit is None:
            raise TypeError("download comes after list_files")
        with self._repository.errors():
            url = self._repository.url(self._listed.get(file.name, file.name), self._commit)
            metadata = self._metadata(url, file)
            if (
                file.sha256 is None
            ):  # small, and nothing but this method verifies it: what is there may be spoilt
                path.write_bytes(b"")
            if (
                metadata.xet_file_data is not None
                and is_xet_available()
                and _size(path) == 0 != file.size
            ):
                xet_get(
                    incomplete_path=path,
                    xet_file_data=metadata.xet_file_data,
                    headers=build_hf_headers(),
                    expected_size=file.size,
                )
            else:
                self._download_by_range(url, file, path)
        if file.sha256 is None and (found := git_object_id(path)) != file.version:
            path.unlink()
            raise ServiceUnavailable(
                f"{self.uri}: {file.name} came with the git object id {found}, expected {file.version}; retry"
            )

    def _metadata(self, url: str, file: RemoteFile) -> HfFileMetadata:
        """Return what the hub says of a file; raise DataInvalid if that is not the listed one."""
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
        while (before := _size(path)) != file.size:
            try:
                _receive(url, path, file.size)
            except (httpx2.TransportError, HfHubHTTPError) as error:
                if (
                    isinstance(error, HfHubHTTPError)
                    and error.response.status_code not in TEMPORARY_STATUSES
                ):
                    raise
                fruitless = 0 if _size(path) > before else fruitless + 1
                if fruitless == FRUITLESS_TRIES:
                    raise
                time.sleep(WAIT_SECONDS * 2 ** (fruitless - 1) if fruitless else 0)


def _receive(url: str, path: Path, size: int | None) -> None:
    """Append to `path` what it lacks of a file of `size` bytes; start again if it has more."""
    start = _size(path)
    if size is not None and start > size:
        path.unlink()
        start = 0
    headers = build_hf_headers() | {"Range": f"bytes={start}-", "Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=headers) as response:
        hf_raise_for_status(response)
        with path.open(
            "ab" if response.status_code == httpx2.codes.PARTIAL_CONTENT else "wb"
        ) as output:
            for data in response.iter_raw():
                if size is not None and output.tell() + len(data) > size:
                    raise DataInvalid(
                        f"{url}: the hub sends more than the {size:,} bytes that it lists; use another hub"
                    )
                output.write(data)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _matches(entry: RepoFile, pattern: str) -> bool:
    name = PurePosixPath(entry.path).name
    return name == pattern or fnmatchcase(name, pattern)


def _remote_file(name: str, entry: RepoFile) -> RemoteFile:
    return RemoteFile(name, entry.size, entry.blob_id, entry.lfs.sha256 if entry.lfs else None)


def git_object_id(path: Path) -> str:
    """Return the object id that git has for the content of a file: SHA-1 over a header and the bytes."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while data := file.read(1024 * 1024):
            digest.update(data)
    return digest.hexdigest()
