"""What is remembered of a cluster, in one folder: its seats, its nodes, its images."""

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
    """Give the folder outside the checkout where all that is slow to make is kept."""
    return Path(os.environ.get("FINETUNE_CACHE") or Path.home() / ".cache" / "finetune-operator").absolute()


def clusters() -> Path:
    """Give the folder that holds a folder for each cluster."""
    return cache() / "clusters"


def folder_of(name: str) -> Path:
    """Give the folder of a cluster. Raises Refused for a name that could not be one."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot be a cluster's name; use a letter, then up to 30 letters, digits and dashes")
    return clusters() / name


def mark(folder: Path) -> str:
    """Give eight digits that tell a cluster from one of the same name in another cache of this host."""
    return blake2s(bytes(folder), digest_size=4).hexdigest()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be alone with a folder; a folder can be locked itself, so that no lock file stays behind."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


class TakenDown(UsageError):
    """The cluster went while a verb waited for its turn."""


class SharedFolder(Protocol):
    """What has a cluster's folder."""

    folder: Path


Of = TypeVar("Of", bound=SharedFolder)
P = ParamSpec("P")


def exclusive(verb: Callable[Concatenate[Of, P], None]) -> Callable[Concatenate[Of, P], None]:
    """Let a verb wait until no other one changes the cluster. Such verbs may not call each other."""

    @wraps(verb)
    def act(of: Of, /, *given: P.args, **named: P.kwargs) -> None:
        with locked_cluster(of.folder):
            verb(of, *given, **named)

    return act


@contextmanager
def locked_cluster(folder: Path) -> Iterator[None]:
    """Be the only one who changes a cluster. Raises TakenDown when it is not there or went while this one waited.

    The lock is on the folder itself, and goes with its holder, however that ends.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError as gone:
        raise TakenDown(_none(folder)) from gone
    try:
        _wait_for_others(handle, folder)
        yield
    finally:
        os.close(handle)


def _none(folder: Path) -> str:
    return f"there is no cluster {folder.name}; `python -m testcluster up` makes one"


def _wait_for_others(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"waiting for what else is done to cluster {folder.name} …", file=sys.stderr, flush=True)
        fcntl.flock(handle, fcntl.LOCK_EX)
    # By now the folder may be gone, or belong to another cluster of that name.
    if not folder.exists() or not os.path.samestat(os.fstat(handle), folder.stat()):
        raise TakenDown(f"cluster {folder.name} was taken down meanwhile; nothing was done")


@dataclass
class State:
    """One cluster's memory; save() is atomic."""

    folder: Path
    subnet: int
    indexes: dict[str, int] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    fake_nodes: int = 0
    image_store: str = ""
    loaded: list[str] = field(default_factory=list)
    """Archives imported after the start, which a fresh node has to be given."""

    @staticmethod
    def read(folder: Path) -> State:
        """Read it. Raises Refused when there is no cluster, or one that never came up."""
        try:
            content = json.loads((folder / "cluster.json").read_text())
            nodes = {name: Node(**node) for name, node in content.pop("nodes").items()}
            return State(folder=folder, nodes=nodes, **content)
        except FileNotFoundError as missing:
            raise UsageError(_none(folder)) from missing
        except (ValueError, TypeError, AttributeError, KeyError) as broken:
            raise UsageError(
                f"{folder}/cluster.json cannot be understood ({broken!r}); "
                f"`python -m testcluster --name {folder.name} down` takes away what there is"
            ) from broken

    def save(self) -> None:
        """Write it."""
        content = {key: value for key, value in asdict(self).items() if key != "folder"}
        fresh = self.folder / "cluster.json.new"
        fresh.write_text(json.dumps(content, indent=1))
        fresh.replace(self.folder / "cluster.json")

    def assign_index(self, node: Node) -> None:
        """Give a node the first free seat. Raises Refused for a name that is taken."""
        if node.name in self.nodes:
            raise UsageError(f"{node.name} was made by somebody else meanwhile; ask again")
        free = (seat for seat in range(1, len(self.indexes) + 2) if seat not in self.indexes.values())
        self.indexes[node.name] = next(free)
        self.nodes[node.name] = node

    def known(self, name: str) -> Node:
        """Find a node by name. Raises Refused that names those there are."""
        if name not in self.nodes:
            raise UsageError(
                f"no node {name!r} in cluster {self.folder.name}; there are {', '.join(sorted(self.nodes))}"
            )
        return self.nodes[name]


def create(folder: Path, taken: set[int]) -> State:
    """Begin a cluster: a folder of its own and a subnet that nobody here uses. Raises Refused when it exists."""
    with locked(clusters()):
        if folder.exists():
            raise UsageError(
                f"cluster {folder.name} exists; `python -m testcluster --name {folder.name} down` removes it"
            )
        free = sorted(set(range(256)) - set(read_field("subnet")) - taken)
        if not free:
            raise UsageError(
                "every network 10.89.0.0/24 … 10.89.255.0/24 is in use on this host; remove a cluster or a route"
            )
        folder.mkdir(mode=0o700)
        state = State(folder, free[0])
        state.save()
        return state


def read_field(what: str) -> Iterator[Any]:
    """Give what each cluster of this host has in one field; one that goes meanwhile, or is broken, says nothing."""
    for file in clusters().glob("*/cluster.json"):
        with suppress(OSError, ValueError, TypeError, KeyError):
            yield json.loads(file.read_text())[what]


def take_down(folder: Path, remove: Callable[[], None]) -> None:
    """Remove a cluster when it is its turn; one that somebody else took down meanwhile is done."""
    if not folder.exists():
        remove()
        return
    with suppress(TakenDown), locked_cluster(folder):
        remove()


def remove(folder: Path) -> None:
    """Remove a cluster's folder."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        shutil.rmtree(folder)
