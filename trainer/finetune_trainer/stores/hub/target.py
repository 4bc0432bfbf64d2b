"""The Hugging Face hub as a target of models: hf://ORG/NAME.

A push is one commit on main. The hub makes it only if main still is the commit that the push has looked at. Readers see
the old commit or the new commit. The tag sha256-HEX names the digest.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, get_token
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.lfs import UploadInfo, post_lfs_batch_info

# Private, because the library exports no way to ask whether it would use xet.
from huggingface_hub.utils._runtime import is_xet_available

from finetune_trainer.runtime.artifacts import (
    MANIFEST,
    CorruptArtifact,
    digest_file,
    digest_of_value,
)
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    CredentialsRejected,
    ServiceUnavailable,
)
from finetune_trainer.stores.concurrent import in_thread
from finetune_trainer.stores.hub.client import HubRepository, HubUri
from finetune_trainer.stores.hub.source import git_object_id
from finetune_trainer.stores.port import Publication
from finetune_trainer.stores.publications import CARD, tag_name, without_card

LOOKS = 10
"""Commits of other processes that a push gives way to before it ends."""
STALE = frozenset({409, 412})
"""Statuses of a commit with a parent that is no longer the head."""
NOT_FOUND = 404
BATCH_OBJECTS = 100
# The size of xet's blocks: a smaller file that is uploaded alone would leave a smaller block.
ALONE_BYTES = 64 * 1024 * 1024
"""Size from which xet uploads a file alone."""
LARGEST_MANIFEST = 16 * 1024 * 1024
# The hub itself creates this file, so it is no sign of a foreign repository.
ATTRIBUTES = ".gitattributes"


ManifestEntries = dict[str, dict[str, object]]
"""Size and SHA-256 of each file, by name, as in a manifest."""


@dataclass(frozen=True)
class BranchHead:
    """The commit of main, its files, and the manifest that a push wrote."""

    commit: str
    files: dict[str, RepoFile]
    entries: ManifestEntries | None
    """The entries of the manifest; None if no push wrote main."""


@dataclass(frozen=True)
class SealedModel:
    """A sealed folder with a model."""

    folder: Path
    digest: str
    entries: ManifestEntries
    """The files that the digest is over: all files, or all but the model card."""
    sha256: dict[str, str]
    """By name, with manifest.json."""

    @classmethod
    def read(cls, folder: Path, digest: str, names: Sequence[str]) -> "SealedModel":
        """Return a model from its folder's manifest; raise CorruptArtifact if that has other files or digests."""
        manifest = json.loads((folder / MANIFEST).read_bytes())
        entries: ManifestEntries = manifest["files"]
        different = entries.keys() ^ set(names)
        if different:
            raise CorruptArtifact(
                f"{folder}: {min(different)} is only in its manifest, or not in it"
            )
        digested = without_card(entries)
        if digest_of_value(digested) != digest:
            digested = entries
        if digest_of_value(digested) != digest:
            raise CorruptArtifact(
                f"{folder}: its manifest has the digest {digest_of_value(entries)}, expected {digest}"
            )
        sha256 = {}
        for name, entry in entries.items():
            sha256[name] = str(entry["sha256"])
        sha256[MANIFEST] = digest_file(folder / MANIFEST)
        return cls(folder, digest, digested, sha256)

    def is_file(self, name: str, entry: RepoFile | None) -> bool:
        """Return whether a file of the hub has the content of the model's file."""
        if entry is None:
            return False
        if entry.lfs is not None:
            return entry.lfs.sha256 == self.sha256[name]
        path = self.folder / name
        # The size first: it needs no read of the file.
        if entry.size != path.stat().st_size:
            return False
        return entry.blob_id == git_object_id(path)


class HubTarget:
    """A repository of models that pushes write to."""

    def __init__(self, uri: str, *, private: bool = True) -> None:
        """Raise ConfigInvalid if the URI is not hf://ORG/NAME. `private` counts when the repository is created."""
        parts = HubUri.parse(uri)
        if parts.path or parts.revision or "/" not in parts.name:
            raise ConfigInvalid(
                f"{uri}: a model is pushed to main of a whole repository; use hf://ORG/NAME"
            )
        self.uri = uri
        self._private = private
        self._repository = HubRepository(uri, parts.name, "model")

    def check(self) -> None:
        """Raise CredentialsRejected without a token that may write, ConfigInvalid if no push wrote main."""
        if get_token() is None:
            raise CredentialsRejected(
                f"{self.uri}: a push needs a token; set HF_TOKEN in envFrom to one"
            )
        with self._repository.errors():
            # What a fine-grained token may write is known to the hub only.
            token = self._repository.api.whoami()["auth"]["accessToken"]
            if token["role"] == "read":
                raise CredentialsRejected(
                    f"{self.uri}: HF_TOKEN may only read; create a token that may write"
                )
            commit = self._commit_of_main()
            if commit:
                self._look_at(commit)

    def publish(self, folder: Path, digest: str, names: Sequence[str]) -> Publication:
        """Commit the files to main and tag the commit. See `StoreTarget.publish`.

        Raise CorruptArtifact, and commit nothing, if a file differs from the folder's manifest. Raise Interrupted as
        `concurrent.for_each` does.
        """
        model = SealedModel.read(folder, digest, names)
        return in_thread(lambda: self._publish(model))

    def _publish(self, model: SealedModel) -> Publication:
        sent = 0
        with self._repository.errors():
            # Each round looks at main anew: the commit is made only on top of the head that was looked at.
            for _ in range(LOOKS):
                head = self._head()
                if _is_published(model, head):
                    return self._tagged(head.commit, model.digest, sent)
                added, deleted = _differences(model, head.files)
                # Before the commit, so that the commit itself is one short request.
                sent += self._send(model, added)
                commit = self._commit(model, head, added, deleted)
                if commit:
                    return self._tagged(commit, model.digest, sent)
        raise ServiceUnavailable(
            f"{self.uri}: main has moved {LOOKS} times meanwhile; retry when other pushes are done"
        )

    def _head(self) -> BranchHead:
        """Return the present head of main; create the repository if there is none.

        Raise ConfigInvalid if it has files that no push wrote.
        """
        commit = self._commit_of_main()
        if commit is None:
            self._repository.api.create_repo(
                self._repository.name, private=self._private, exist_ok=True
            )
            commit = self._repository.commit_of("main")
        return self._look_at(commit)

    def _commit_of_main(self) -> str | None:
        """Return the commit of main, or None if there is no such repository."""
        try:
            return self._repository.commit_of("main")
        except RepositoryNotFoundError as error:
            # The library raises this error for 401, too, which says nothing about the repository.
            if error.response.status_code != NOT_FOUND:
                raise
            return None

    def _look_at(self, commit: str) -> BranchHead:
        """Return the content of a commit; raise ConfigInvalid if it has files that no push wrote."""
        files = {entry.path: entry for entry in self._repository.files(commit)}
        entries = self._manifest(commit, files)
        foreign = files.keys() - {ATTRIBUTES}
        if entries is not None:
            foreign -= {MANIFEST, *entries}
        if foreign:
            self._check_empty_card(commit, sorted(foreign))
        return BranchHead(commit, files, entries)

    def _manifest(
        self, commit: str, files: dict[str, RepoFile]
    ) -> ManifestEntries | None:
        """Return the entries of the manifest of a push; None if there is no such manifest."""
        if MANIFEST not in files or files[MANIFEST].size > LARGEST_MANIFEST:
            return None
        try:
            manifest = json.loads(self._repository.read(MANIFEST, commit))
            if manifest["about"]["stage"] != "push":
                return None
            return dict(manifest["files"])
        except (ValueError, KeyError, TypeError):
            return None

    def _check_empty_card(self, commit: str, foreign: list[str]) -> None:
        """Raise ConfigInvalid unless the only file is a README.md without text, as a new repository has."""
        is_foreign = True
        if foreign == [CARD]:
            text = self._repository.read(CARD, commit).decode(errors="replace")
            # The hub's own form for new repositories writes metadata, such as the licence.
            if text.startswith("---\n"):
                _, _, text = text.removeprefix("---\n").partition("---\n")
            is_foreign = bool(text.strip())
        if is_foreign:
            raise ConfigInvalid(
                f"{self.uri}: {foreign[0]} was not written by a push; move it, or choose another repository"
            )

    def _send(self, model: SealedModel, added: list[CommitOperationAdd]) -> int:
        """Upload large files that the hub lacks. Return the bytes of these files and of small files.

        xet sends less than a whole file if the hub has a part of its bytes already. No commit names the files yet.
        Raise CorruptArtifact if a file differs from the manifest.
        """
        # Asked before the upload, after which the hub lacks nothing.
        missing = self._missing_bytes(model, added)
        for batch in _upload_batches(added):
            self._repository.api.preupload_lfs_files(
                self._repository.name, batch, free_memory=False
            )
        # The library has hashed each file by now. A commit of other bytes would be a model with a wrong manifest.
        for operation in added:
            name = operation.path_in_repo
            if operation.upload_info.sha256.hex() != model.sha256[name]:
                raise CorruptArtifact(
                    f"{model.folder / name} does not match the digest in its manifest"
                )
        return missing

    def _missing_bytes(
        self, model: SealedModel, added: list[CommitOperationAdd]
    ) -> int:
        """Return the bytes of the files that the hub does not have as objects."""
        sizes = {}
        for item in added:
            sha256 = model.sha256[item.path_in_repo]
            sizes[sha256] = item.upload_info.size
        infos = [
            UploadInfo(size, b"", bytes.fromhex(sha256))
            for sha256, size in sizes.items()
            if size
        ]
        missing = 0
        for start in range(0, len(infos), BATCH_OBJECTS):
            answers, _, _ = post_lfs_batch_info(
                infos[start : start + BATCH_OBJECTS],
                token=None,
                repo_type=self._repository.type,
                repo_id=self._repository.name,
                endpoint=self._repository.endpoint,
            )
            # An object that the hub has already needs no action.
            lacking = [answer["size"] for answer in answers if answer.get("actions")]
            missing += sum(lacking)
        return missing

    def _commit(
        self,
        model: SealedModel,
        head: BranchHead,
        added: list[CommitOperationAdd],
        deleted: list[str],
    ) -> str | None:
        """Make the commit and return it; return None if main has moved, or is not the model."""
        deletions = [CommitOperationDelete(name, is_folder=False) for name in deleted]
        try:
            commit = self._repository.api.create_commit(
                self._repository.name,
                [*added, *deletions],
                commit_message=f"Publish {tag_name(model.digest)}",
                parent_commit=head.commit,
            ).oid
        except HfHubHTTPError as error:
            if error.response.status_code in STALE:
                return None
            raise
        # If every file has come meanwhile, the hub's library commits nothing and returns the head, whatever that is.
        files = {entry.path: entry for entry in self._repository.files(commit)}
        added, deleted = _differences(model, files)
        if added or deleted:
            return None
        return commit

    def _tagged(self, commit: str, digest: str, sent: int) -> Publication:
        self._repository.api.create_tag(
            self._repository.name, tag=tag_name(digest), revision=commit, exist_ok=True
        )
        return Publication(f"hf://{self._repository.name}@{commit}", sent)


def _upload_batches(added: list[CommitOperationAdd]) -> list[list[CommitOperationAdd]]:
    """Return the files that are uploaded together: with xet, each large file alone."""
    if not is_xet_available():
        return [added]
    # The hub knows the files of an upload over xet when the upload has ended. After a kill, the next push may send them
    # again, so large files end one by one.
    large = []
    small = []
    for item in added:
        if item.upload_info.size >= ALONE_BYTES:
            large.append([item])
        else:
            small.append(item)
    return [*large, small]


def _is_published(model: SealedModel, head: BranchHead) -> bool:
    """Return whether the head has the files that make the model. Another model card stays, also if a user wrote it."""
    if head.entries is None:
        return False
    entries = head.entries
    if not entries.keys() <= head.files.keys():
        return False
    if CARD not in model.entries:
        entries = without_card(entries)
    if entries != model.entries:
        return False
    # A user may have changed a file without its entry in the manifest.
    return all(model.is_file(name, head.files[name]) for name in entries)


def _differences(
    model: SealedModel, files: dict[str, RepoFile]
) -> tuple[list[CommitOperationAdd], list[str]]:
    """Return the files to add to a commit of the hub, and the names to delete from it, so that it becomes the model."""
    added = [
        CommitOperationAdd(name, model.folder / name)
        for name in sorted(model.sha256)
        if not model.is_file(name, files.get(name))
    ]
    deleted = files.keys() - model.sha256.keys() - {ATTRIBUTES}
    return added, sorted(deleted)
