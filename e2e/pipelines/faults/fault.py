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
    default: bool = False
    """Whether it runs without FAULTS=all."""
    changes: Object = field(default_factory=dict)
    """Changes of the pipeline's spec."""
    seconds: float = 300
    """Within which the pipeline finishes after the fault."""

    @property
    def name(self) -> str:
        """The fault in words."""
        return self.inject.__name__.replace("_", " ")


def chosen(faults: tuple[Fault, ...]) -> list[Fault]:
    """Return the faults of a default run; with FAULTS=all, all of them."""
    return [
        fault for fault in faults if fault.default or os.environ.get("FAULTS") == "all"
    ]
