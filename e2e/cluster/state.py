"""What is remembered of a cluster, in one folder: its seats, its nodes, its images."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from e2e.cluster.nodes import Node
from e2e.cluster.problems import Refused

_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")


def cache() -> Path:
    """Give the folder outside the checkout where all that is slow to make is kept."""
    return Path(os.environ.get("FINETUNE_CACHE") or Path.home() / ".cache" / "finetune-operator")


def clusters() -> Path:
    """Give the folder that holds a folder for each cluster."""
    return cache() / "clusters"


def folder_of(name: str) -> Path:
    """Give the folder of a cluster. Raises Refused for a name that could not be one."""
    if not _NAME.fullmatch(name):
        raise Refused(f"{name!r} cannot be a cluster's name; use a letter, then up to 30 letters, digits and dashes")
    return clusters() / name


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


@dataclass
class State:
    """One cluster's memory; save() is atomic."""

    folder: Path
    subnet: int
    seats: dict[str, int] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    fake_nodes: int = 0
    pantry: str = ""
    loaded: list[str] = field(default_factory=list)
    """Archives imported after the start, which a fresh node has to be given."""

    @staticmethod
    def read(folder: Path) -> State:
        """Read it. Raises Refused when there is no cluster, or one that never came up."""
        try:
            content = json.loads((folder / "cluster.json").read_text())
        except FileNotFoundError as missing:
            raise Refused(f"there is no cluster {folder.name}; `python -m e2e.cluster up` makes one") from missing
        nodes = {name: Node(**node) for name, node in content.pop("nodes").items()}
        return State(folder=folder, nodes=nodes, **content)

    def save(self) -> None:
        """Write it."""
        content = {key: value for key, value in asdict(self).items() if key != "folder"}
        fresh = self.folder / "cluster.json.new"
        fresh.write_text(json.dumps(content, indent=1))
        fresh.replace(self.folder / "cluster.json")

    def seat(self, node: Node) -> None:
        """Give a node the first free seat."""
        free = (seat for seat in range(1, len(self.seats) + 2) if seat not in self.seats.values())
        self.seats[node.name] = next(free)
        self.nodes[node.name] = node

    def known(self, name: str) -> Node:
        """Find a node by name. Raises Refused that names those there are."""
        if name not in self.nodes:
            raise Refused(f"no node {name!r} in cluster {self.folder.name}; there are {', '.join(sorted(self.nodes))}")
        return self.nodes[name]


def claim(folder: Path, taken: set[int]) -> State:
    """Begin a cluster: a folder of its own and a subnet that nobody here uses. Raises Refused when it exists."""
    with locked(clusters()):
        if folder.exists():
            raise Refused(f"cluster {folder.name} exists; `python -m e2e.cluster --name {folder.name} down` removes it")
        free = sorted(set(range(256)) - set(all_say("subnet")) - taken)
        if not free:
            raise Refused(
                "every network 10.89.0.0/24 … 10.89.255.0/24 is in use on this host; remove a cluster or a route"
            )
        folder.mkdir(mode=0o700)
        state = State(folder, free[0])
        state.save()
        return state


def all_say(what: str) -> Iterator[Any]:
    """Give what each cluster of this host has in one field; one that goes meanwhile says nothing."""
    for file in clusters().glob("*/cluster.json"):
        with suppress(FileNotFoundError):
            yield json.loads(file.read_text())[what]


def forget(folder: Path) -> None:
    """Remove a cluster's folder."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        shutil.rmtree(folder)
