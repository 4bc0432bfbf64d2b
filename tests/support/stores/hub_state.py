"""The state of a Hugging Face hub in a folder: tokens, repositories, commits, git blobs and LFS objects."""

import hashlib
import json
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from support.stores.hub_xet import XetStorage

Kind = Literal["models", "datasets"]
ZERO_COMMIT = "0" * 40
LFS_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".onnx",
    ".parquet",
    ".arrow",
    ".gz",
    ".zip",
    ".model",
)
LFS_BYTES = 10_000_000


class Refused(Exception):
    """The answer to a request is an error: a status, an error code of the hub and a message."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message or code)
        self.status = status
        self.code = code
        self.message = message


@dataclass(frozen=True)
class Entry:
    """A file of a commit; `sha256` is set if its content is an LFS object."""

    oid: str
    size: int
    sha256: str | None = None

    @property
    def etag(self) -> str:
        return self.sha256 or self.oid


@dataclass
class Access:
    """What the holder of a token may do."""

    user: str
    organizations: list[str] = field(default_factory=list)
    write: bool = True
    accepted: list[str] = field(default_factory=list)
    """Gated repositories whose licence the user has accepted."""

    def owns(self, repository: str) -> bool:
        return repository.split("/", maxsplit=1)[0] in {self.user, *self.organizations}


@dataclass
class Faults:
    """What the server does wrong on purpose."""

    down: bool = False
    """Every request is answered with 503."""
    bytes_per_second: int | None = None
    """Rate of every transfer of a file, in either direction."""
    cut_after: int | None = None
    """Every transfer of a file ends after so many bytes with a closed connection."""
    lose_commit_answer: bool = False
    """A commit is made, and the connection is closed without an answer."""
    spoil: bool = False
    """The first byte of every file is inverted on its way to the client."""


def git_oid(content: bytes) -> str:
    """Return the git object id of a blob."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_large(name: str, size: int, sample: bytes = b"") -> bool:
    """Return whether the hub stores a file as an LFS object."""
    return name.endswith(LFS_SUFFIXES) or size >= LFS_BYTES or b"\0" in sample


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)


class Repository:
    """One repository; every method reads the folder, so that another process sees the same."""

    def __init__(
        self, folder: Path, name: str, kind: Kind, xet: XetStorage | None = None
    ) -> None:
        self.folder = folder
        self.name = name
        self.kind = kind
        self.xet = xet
        for below in ("blobs", "objects", "commits", "parts"):
            (folder / below).mkdir(parents=True, exist_ok=True)

    @property
    def settings(self) -> dict[str, bool]:
        return json.loads((self.folder / "settings.json").read_text())

    @property
    def refs(self) -> dict[str, dict[str, str]]:
        return json.loads((self.folder / "refs.json").read_text())

    @property
    def head(self) -> str:
        return self.refs["branches"]["main"]

    def create(self, *, private: bool, gated: bool, xet: bool) -> None:
        write_json(
            self.folder / "settings.json",
            {"private": private, "gated": gated, "xet": xet},
        )
        write_json(
            self.folder / "refs.json", {"branches": {"main": ZERO_COMMIT}, "tags": {}}
        )
        attributes = "".join(
            f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n"
            for suffix in LFS_SUFFIXES
        )
        self.push({".gitattributes": attributes.encode()}, title="initial commit")

    def resolve(self, revision: str) -> str:
        """Return the commit of a branch, a tag or a commit."""
        refs = self.refs
        for kind in ("branches", "tags"):
            if revision in refs[kind]:
                return refs[kind][revision]
        if len(revision) == 40 and (self.folder / "commits" / revision).is_file():
            return revision
        raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")

    def commit_data(self, commit: str) -> dict[str, Any]:
        return json.loads((self.folder / "commits" / commit).read_text())

    def tree(self, commit: str) -> dict[str, Entry]:
        if commit == ZERO_COMMIT:
            return {}
        return {
            name: Entry(**entry)
            for name, entry in self.commit_data(commit)["tree"].items()
        }

    def history(self) -> list[str]:
        """Return the commits of main, the newest first."""
        commits = []
        commit = self.head
        while commit != ZERO_COMMIT:
            commits.append(commit)
            commit = self.commit_data(commit)["parent"]
        return commits

    def content_path(self, entry: Entry) -> Path:
        if entry.sha256:
            return self.object_path(entry.sha256)
        return self.folder / "blobs" / entry.oid

    def object_path(self, sha256: str) -> Path:
        return self.folder / "objects" / sha256

    def has_object(self, sha256: str, size: int) -> bool:
        """Return whether there is an LFS object of this size. An object that is only in xet is copied from there."""
        path = self.object_path(sha256)
        content = None
        if self.xet and not path.is_file():
            content = self.xet.content(sha256)
        if content is not None:
            temporary = path.with_name(f".{sha256}.{os.urandom(4).hex()}")
            temporary.write_bytes(content)
            temporary.replace(path)
        return path.is_file() and path.stat().st_size == size

    def xet_hash(self, sha256: str) -> str | None:
        """Return the hash by which clients find a large file in xet; None if it is not there."""
        if not self.settings["xet"]:
            return None
        return self.xet.hashes().get(sha256) if self.xet else sha256

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """Return names and contents of a revision, without .gitattributes."""
        tree = self.tree(self.resolve(revision))
        return {
            name: self.content_path(entry).read_bytes()
            for name, entry in tree.items()
            if name != ".gitattributes"
        }

    def push(
        self,
        files: dict[str, bytes],
        *,
        delete: tuple[str, ...] = (),
        title: str = "push",
    ) -> str:
        """Commit files to main, as a git client would; return the commit."""
        return self.commit(
            "main",
            {name: self.store(name, data) for name, data in files.items()},
            delete=delete,
            title=title,
        )

    def store(self, name: str, content: bytes) -> Entry:
        if not is_large(name, len(content), content[:512]):
            return self.store_blob(content)
        sha256 = hashlib.sha256(content).hexdigest()
        self.object_path(sha256).write_bytes(content)
        return self.pointer(sha256, len(content))

    def store_blob(self, content: bytes) -> Entry:
        entry = Entry(git_oid(content), len(content))
        self.content_path(entry).write_bytes(content)
        return entry

    def pointer(self, sha256: str, size: int) -> Entry:
        """Return the entry of an LFS object, which has the git object id of its pointer file."""
        text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
        return Entry(git_oid(text.encode()), size, sha256)

    def commit(
        self,
        branch: str,
        additions: dict[str, Entry],
        *,
        delete: tuple[str, ...],
        title: str,
    ) -> str:
        parent = self.refs["branches"][branch]
        tree = {
            name: entry
            for name, entry in self.tree(parent).items()
            if name not in delete
        } | additions
        data = {
            "parent": parent,
            "title": title,
            "tree": {name: asdict(tree[name]) for name in sorted(tree)},
        }
        commit = hashlib.sha1(json.dumps(data).encode()).hexdigest()
        write_json(self.folder / "commits" / commit, data)
        self.set_ref("branches", branch, commit)
        return commit

    def set_ref(
        self, kind: Literal["branches", "tags"], name: str, commit: str
    ) -> None:
        refs = self.refs
        refs[kind][name] = commit
        write_json(self.folder / "refs.json", refs)


class Hub:
    """All repositories, tokens and faults of a hub, in one folder."""

    def __init__(
        self, folder: Path, cas_url: str = "", xet: XetStorage | None = None
    ) -> None:
        """Create a hub. With `xet`, its new repositories have their large files there."""
        self.folder = folder
        self.xet = xet
        self.cas_url = xet.url if xet else cas_url
        self.url = self.storage_url = ""
        self.active = 0
        """Requests that a server in this process has begun to answer. What they transfer is not in the log yet."""
        folder.mkdir(parents=True, exist_ok=True)
        if not self._tokens_path.is_file():
            write_json(self._tokens_path, {})
        if not self._faults_path.is_file():
            self.set_faults()

    @property
    def _tokens_path(self) -> Path:
        return self.folder / "tokens.json"

    @property
    def _faults_path(self) -> Path:
        return self.folder / "faults.json"

    @property
    def log_path(self) -> Path:
        return self.folder / "requests.jsonl"

    def set_faults(self, **faults: Any) -> None:
        """Set the faults; all other faults end."""
        write_json(self._faults_path, asdict(Faults(**faults)))

    @property
    def faults(self) -> Faults:
        return Faults(**json.loads(self._faults_path.read_text()))

    def add_token(
        self, token: str, user: str, organizations: tuple[str, ...] = (), **access: Any
    ) -> None:
        tokens = json.loads(self._tokens_path.read_text())
        write_json(
            self._tokens_path,
            tokens | {token: asdict(Access(user, list(organizations), **access))},
        )

    def access(self, token: str) -> Access | None:
        fields = json.loads(self._tokens_path.read_text()).get(token)
        if not fields:
            return None
        return Access(**fields)

    def add_repository(
        self,
        name: str,
        files: dict[str, bytes] | None = None,
        *,
        kind: Kind = "models",
        private: bool = False,
        gated: bool = False,
        xet: bool = False,
    ) -> Repository:
        """Create a repository. With `xet`, a server at `cas_url` is named for its large files as well."""
        repository = Repository(self.folder / kind / name, name, kind, self.xet)
        repository.create(private=private, gated=gated, xet=xet or self.xet is not None)
        if files:
            repository.push(files)
        return repository

    def repository(self, name: str, kind: Kind = "models") -> Repository | None:
        folder = self.folder / kind / name
        return (
            Repository(folder, name, kind, self.xet)
            if (folder / "settings.json").is_file()
            else None
        )

    def requests(self) -> list[dict[str, Any]]:
        """Return what was requested: method, path, status, and the bytes of files received and sent.

        Wait for requests that are being answered: the client may have all bytes before the log has their number.
        """
        while self.active:
            time.sleep(0.005)
        return (
            [json.loads(line) for line in self.log_path.read_text().splitlines()]
            if self.log_path.exists()
            else []
        )

    def forget_requests(self) -> None:
        self.requests()
        self.log_path.unlink(missing_ok=True)

    def downloads(self) -> Counter[str]:
        """Return how often each file was sent, by its name; a part of a file counts, too."""
        return Counter(
            entry["file"]
            for entry in self.requests()
            if entry["file"] and entry["sent"]
        )

    def received_bytes(self) -> int:
        """Return the bytes of files that clients have uploaded, whole or not."""
        return sum(entry["received"] for entry in self.requests())

    def sent_bytes(self) -> int:
        return sum(entry["sent"] for entry in self.requests())
