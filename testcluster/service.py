"""A program that is kept running on a machine of the cluster, or on the host next to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Service:
    """A command line and its environment; the name is also the name of its log file."""

    name: str
    argv: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
