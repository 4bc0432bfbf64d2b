"""A small model of the specification: what a pipeline is in the end, from what its user did to it: pure."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from support.faults.manifest import manifest

Object = dict[str, Any]
ABSENT = "Absent"
SUCCEEDED = "Succeeded"
CANCELLED = "Cancelled"
SUSPENDED = "Suspended"
JOB_STAGES = ("prepare", "train", "evaluate")
SERVED_STAGES = (*JOB_STAGES, "push", "deploy")


@dataclass(frozen=True)
class Wanted:
    """A pipeline as its user wants it. Every edit increases a version: no result of an earlier version counts."""

    name: str
    serves: bool
    """Whether it has push and deploy."""
    retained: bool
    """Whether its claim outlives it."""
    uid: str = ""
    """Empty: it does not exist."""
    train: int = 0
    evaluate: int = 0
    notes: int = 0
    """Version of what changes how train runs, and never its result."""
    suspended: bool = False
    cancelled: bool = False
    token: int = 0
    """The newest value of an annotation."""

    def created(self, uid: str) -> "Wanted":
        """Return it as a new pipeline with the same spec."""
        return replace(self, uid=uid)

    def deleted(self) -> "Wanted":
        """Return it as deleted. A user who creates it again wants it to run."""
        return replace(self, uid="", suspended=False, cancelled=False, token=0)

    def spec(self) -> Object:
        """Return the fields of the spec that edits change."""
        return {
            "suspend": self.suspended,
            "train": {
                "maxSteps": 100 + self.train,
                "pod": _env(VERSION=f"{self.train}", NOTE=f"{self.notes}"),
            },
            "evaluate": {
                "tasks": [{"name": "exam", "limit": 1 + self.evaluate}],
                "pod": _env(VERSION=f"{self.train}.{self.evaluate}"),
            },
        }

    def manifest(self) -> Object:
        """Return the manifest."""
        stages = SERVED_STAGES if self.serves else JOB_STAGES
        workspace = {"whenDeleted": "Retain" if self.retained else "Delete"}
        return manifest(self.name, stages=stages, workspace=workspace, **self.spec())

    def successes(self) -> frozenset[tuple[str, str]]:
        """Return the Jobs, without attempt, and versions that must have succeeded before nothing is left to do.

        Push is not among them: a pipeline with push and deploy is never left suspended or cancelled.
        """
        stem = f"{self.name}-{self.uid.replace('-', '')[:8]}"
        versions = ("", f"{self.train}", f"{self.train}.{self.evaluate}")
        return frozenset(
            (f"{stem}-{stage}", version)
            for stage, version in zip(JOB_STAGES, versions, strict=True)
        )


def possible_phases(
    wanted: Wanted,
    succeeded: AbstractSet[tuple[str, str]],
    readable: AbstractSet[tuple[str, str]],
) -> frozenset[str]:
    """Return the phases in which the pipeline may be when nothing moves any more.

    `succeeded`: Job and version of all processes that succeeded. `readable`: the processes whose result
    no deletion of the Job can have hidden from the operator. If a result may have been lost, the stage must run again.
    """
    if not wanted.uid:
        return frozenset({ABSENT})
    needed = wanted.successes()
    stopped = SUCCEEDED
    if wanted.cancelled:
        stopped = CANCELLED
    elif wanted.suspended:
        stopped = SUSPENDED
    if wanted.serves or not needed <= succeeded:
        return frozenset({stopped})
    if needed <= readable:
        return frozenset({SUCCEEDED})
    return frozenset({SUCCEEDED, stopped})


def _env(**values: str) -> Object:
    return {"env": [{"name": name, "value": value} for name, value in values.items()]}
