"""A fault: what is done to a running pipeline, and how its attempts must end."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from e2e.pipelines.driver import Object
from e2e.pipelines.faults.scene import Scene

INTERRUPTED = "Interrupted"
FAILED = "Failed"
SUCCEEDED = "Succeeded"


@dataclass(frozen=True)
class Fault:
    """A fault and its verdict."""

    inject: Callable[[Scene], None]
    """Does the fault to a pipeline that has just been created; it has the name of the fault."""
    outcomes: tuple[str, ...]
    """Outcomes of the attempts of train."""
    evidence: str = ""
    """Regular expression for the message of the first attempt."""
    exit_codes: tuple[int | None, ...] = (None,)
    """Exit codes that the first attempt may have; None: the operator observes none."""
    graceful: bool = True
    """Whether SIGTERM saves the current step, so that none is lost."""
    changes: Object = field(default_factory=dict)
    """Changes of the pipeline's spec."""
    seconds: float = 300
    """Within which the pipeline finishes after the fault."""

    @property
    def name(self) -> str:
        """The fault in words."""
        return self.inject.__name__.replace("_", " ")


def chosen(faults: tuple[Fault, ...]) -> list[Fault]:
    """Return the faults with FAULTS=all, else none: test_several_nodes.py loses a node, and e2e/kind evicts a pod."""
    return list(faults) if os.environ.get("FAULTS") == "all" else []
