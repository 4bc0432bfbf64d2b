"""The state of a cluster on disk, in one folder: its subnet, the indexes of its nodes, its images."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import wraps
from hashlib import blake2s
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from testcluster.errors import UsageError
from testcluster.nodes import Node

_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")


def cache() -> Path:
    """Return the folder outside the checkout that holds programs, images and clusters."""
    return Path(
        os.environ.get("FINETUNE_CACHE") or Path.home() / ".cache" / "finetune-operator"
    ).absolute()


def clusters() -> Path:
    """Return the folder that holds one folder for each cluster."""
    return cache() / "clusters"


def folder_of(name: str) -> Path:
    """Return the folder of a cluster. Raises UsageError for an invalid name."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a valid cluster name; use a lowercase letter, then up to 30 of a-z, 0-9 and dashes"
        )
    return clusters() / name


def mark(folder: Path) -> str:
    """Return eight hexadecimal digits that distinguish clusters of one name in two caches of this host."""
    return blake2s(bytes(folder), digest_size=4).hexdigest()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder. The folder itself is locked, so no lock file is left behind."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def check_disk(folder: Path, needed: int, consumer: str, fix: str) -> None:
    """Raise UsageError when the disk of a folder, which need not exist yet, has fewer free bytes than needed."""
    present = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(present).free
    if free < needed:
        raise UsageError(
            f"{present} has {free / (1 << 30):.1f} GiB free, but {consumer} needs {needed >> 30}; "
            f"free disk space, or set {fix}"
        )


class TakenDown(UsageError):
    """A cluster that was deleted while a verb waited for its lock."""


class HasFolder(Protocol):
    """An object with the folder of a cluster."""

    folder: Path


Owner = TypeVar("Owner", bound=HasFolder)
P = ParamSpec("P")


def exclusive(
    verb: Callable[Concatenate[Owner, P], None],
) -> Callable[Concatenate[Owner, P], None]:
    """Make a verb wait until no other verb changes the cluster.

    Such verbs may not call each other: the second would wait for the first forever.
    """

    @wraps(verb)
    def run(owner: Owner, /, *arguments: P.args, **options: P.kwargs) -> None:
        with locked_cluster(owner.folder):
            verb(owner, *arguments, **options)

    return run


@contextmanager
def locked_cluster(folder: Path) -> Iterator[None]:
    """Hold the lock of a cluster. Raises TakenDown when the cluster does not exist or is deleted during the wait.

    The lock is on the folder itself, so the kernel releases it however the holding process ends.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError as missing:
        raise TakenDown(_no_cluster(folder)) from missing
    try:
        _wait_for_lock(handle, folder)
        yield
    finally:
        os.close(handle)


def _no_cluster(folder: Path) -> str:
    return f"there is no cluster {folder.name}; `python -m testcluster --name {folder.name} up` creates one"


def _wait_for_lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(
            f"waiting for another command that changes cluster {folder.name} …",
            file=sys.stderr,
            flush=True,
        )
        fcntl.flock(handle, fcntl.LOCK_EX)
    # By now the folder may be deleted, or belong to a new cluster of the same name.
    if not folder.exists() or not os.path.samestat(os.fstat(handle), folder.stat()):
        raise TakenDown(
            f"cluster {folder.name} was deleted while this command waited; nothing was changed"
        )


@dataclass
class State:
    """The content of cluster.json. `save()` is atomic."""

    folder: Path
    subnet: int
    indexes: dict[str, int] = field(default_factory=dict)
    """Number of each node, from 1; it determines the node's address and pod subnet."""
    nodes: dict[str, Node] = field(default_factory=dict)
    kwok_nodes: int = 0
    image_store: str = ""
    loaded: list[str] = field(default_factory=list)
    """Archives imported after the start; a fresh node needs them as well."""

    @staticmethod
    def read(folder: Path) -> State:
        """Read cluster.json. Raises UsageError when there is no cluster or the file is invalid."""
        try:
            content = json.loads((folder / "cluster.json").read_text())
            nodes = {name: Node(**node) for name, node in content.pop("nodes").items()}
            return State(folder=folder, nodes=nodes, **content)
        except FileNotFoundError as missing:
            raise UsageError(_no_cluster(folder)) from missing
        except (ValueError, TypeError, AttributeError, KeyError) as invalid:
            raise UsageError(
                f"{folder}/cluster.json is invalid ({invalid!r}); "
                f"`python -m testcluster --name {folder.name} down` deletes the cluster"
            ) from invalid

    def save(self) -> None:
        """Write cluster.json."""
        content = {key: value for key, value in asdict(self).items() if key != "folder"}
        fresh = self.folder / "cluster.json.new"
        fresh.write_text(json.dumps(content, indent=1))
        fresh.replace(self.folder / "cluster.json")

    def assign_index(self, node: Node) -> None:
        """Add a node under the lowest free index. Raises UsageError when the name is taken."""
        if node.name in self.nodes:
            raise UsageError(
                f"node {node.name} was created by another command in the meantime; run this command again"
            )
        free = (
            index
            for index in range(1, len(self.indexes) + 2)
            if index not in self.indexes.values()
        )
        self.indexes[node.name] = next(free)
        self.nodes[node.name] = node

    def get_node(self, name: str) -> Node:
        """Return a node by name. Raises UsageError that lists the existing nodes."""
        if name not in self.nodes:
            raise UsageError(
                f"no node {name!r} in cluster {self.folder.name}; its nodes are {', '.join(sorted(self.nodes))}"
            )
        return self.nodes[name]


def create(folder: Path, taken: set[int]) -> State:
    """Create the folder of a cluster and assign it a free subnet.

    `taken` holds the subnets that the host uses otherwise. Raises UsageError when the cluster exists already.
    """
    with locked(clusters()):
        if folder.exists():
            raise UsageError(
                f"cluster {folder.name} already exists; `python -m testcluster --name {folder.name} down` deletes it"
            )
        free = sorted(set(range(256)) - set(read_field("subnet")) - taken)
        if not free:
            raise UsageError(
                "every network 10.89.0.0/24 … 10.89.255.0/24 is in use on this host; delete a cluster or a route"
            )
        folder.mkdir(mode=0o700)
        state = State(folder, free[0])
        state.save()
        return state


def read_field(field_name: str) -> Iterator[Any]:
    """Yield one field of each cluster of this host; a cluster whose file is missing or invalid is skipped."""
    for file in clusters().glob("*/cluster.json"):
        with suppress(OSError, ValueError, TypeError, KeyError):
            yield json.loads(file.read_text())[field_name]


def take_down(folder: Path, remove: Callable[[], None]) -> None:
    """Call `remove` with the cluster's lock held; do nothing when another command deletes the cluster first."""
    if not folder.exists():
        remove()
        return
    with suppress(TakenDown), locked_cluster(folder):
        remove()


def remove(folder: Path) -> None:
    """Delete a cluster's folder."""
    shutil.rmtree(folder, ignore_errors=True)
    # A second attempt that raises the reason why something is left.
    if folder.exists():
        shutil.rmtree(folder)
