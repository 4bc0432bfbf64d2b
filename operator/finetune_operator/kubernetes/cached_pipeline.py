"""A pipeline in the cache: small, and parsed only while it is worked on."""

import zlib
from dataclasses import dataclass, replace
from typing import Any

from finetune_operator.api.group import CANCEL_ANNOTATION, RETRY_ANNOTATION
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import Outcome
from finetune_operator.core.metadata import workspace_name
from finetune_operator.core.observation import ClaimUser
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.kubernetes import fast_json

Object = dict[str, Any]
READ_ANNOTATIONS = frozenset({CANCEL_ANNOTATION, RETRY_ANNOTATION})
WRITING_STAGES = frozenset(kind.name for kind in STAGES if not kind.runs_server)
"""Stages whose attempts write to the workspace; a server does not."""


@dataclass(frozen=True, slots=True)
class CachedPipeline:
    """What is asked of many pipelines at once, and the object's text for the rest."""

    key: Key
    uid: str
    generation: int
    annotations: tuple[tuple[str, str], ...]
    deleting: bool
    claim: str
    created_at: str
    finished: bool
    suspended: bool
    phase: str
    running_jobs: frozenset[str]
    """Jobs of running attempts, as the status has them."""
    writing: bool
    """Whether one of them writes to the workspace."""
    text: bytes
    """The object as compressed JSON, with the annotations that the operator reads: a user may make an object large."""
    parsed: Pipeline | None = None
    """The parsed object, while the pipeline has not finished."""

    def differs(self, other: "CachedPipeline") -> bool:
        """Return whether the user has changed the object; the status is the operator's own."""
        return (self.uid, self.generation, self.annotations, self.deleting) != (
            other.uid,
            other.generation,
            other.annotations,
            other.deleting,
        )

    def frees_claim(self, after: "CachedPipeline") -> bool:
        """Return whether this change lets another pipeline write to the claim."""
        ended = not self.lets_others_go_first and after.lets_others_go_first
        return ended or (self.writing and not after.writing) or self.claim != after.claim

    def as_claim_user(self) -> ClaimUser:
        """Return the pipeline as a user of its claim."""
        return ClaimUser(
            name=self.key.name,
            writing=False,
            recorded=self.writing,
            finished=self.lets_others_go_first,
            seniority=self.seniority,
        )

    @property
    def lets_others_go_first(self) -> bool:
        """Whether a younger pipeline with the claim need not wait: this one starts nothing as it is now."""
        return self.finished or self.deleting or self.suspended

    def content(self) -> Object:
        """Return the object."""
        found: Object = fast_json.decode(zlib.decompress(self.text))
        return found

    @property
    def seniority(self) -> tuple[str, str]:
        """Creation time and uid: the smaller is older."""
        return self.created_at, self.uid

    def with_parsed(self, pipeline: Pipeline) -> "CachedPipeline":
        """Return the entry with the parsed object, which a finished pipeline does not keep."""
        return self if self.finished else replace(self, parsed=pipeline)


def trim_pipeline(found: Object) -> CachedPipeline:
    """Return a pipeline as the cache keeps it."""
    meta, status = found["metadata"], found.get("status") or {}
    own = {name: value for name, value in (meta.get("annotations") or {}).items() if name in READ_ANNOTATIONS}
    names = ("name", "namespace", "uid", "generation", "resourceVersion", "creationTimestamp", "deletionTimestamp")
    kept = {name: meta[name] for name in names if name in meta} | {"annotations": own}
    content = {"metadata": kept, "spec": found.get("spec"), "status": status}
    running = _running_jobs(status)
    workspace = (found.get("spec") or {}).get("workspace") or {}
    return CachedPipeline(
        key=Key(meta["namespace"], meta["name"]),
        uid=meta["uid"],
        generation=meta.get("generation", 0),
        annotations=tuple(sorted(own.items())),
        deleting="deletionTimestamp" in meta,
        claim=workspace.get("existingClaim") or workspace_name(meta["name"]),
        created_at=str(meta.get("creationTimestamp")),
        finished=bool(status.get("finishedAt")),
        suspended=(found.get("spec") or {}).get("suspend") is True,
        phase=str(status.get("phase") or "Pending"),
        running_jobs=frozenset(running.values()),
        writing=not WRITING_STAGES.isdisjoint(running),
        text=zlib.compress(fast_json.encode(content), level=1),
    )


def _running_jobs(status: Object) -> dict[str, str]:
    """Return the Job of each stage whose last attempt is running. The status may be malformed: anyone may write it."""
    found: dict[str, str] = {}
    stages = status.get("stages")
    for stage in stages if isinstance(stages, list) else ():
        attempts = stage.get("attempts") if isinstance(stage, dict) else None
        last = attempts[-1] if isinstance(attempts, list) and attempts else None
        # The default of `outcome` is Running; the operator writes it always.
        if isinstance(last, dict) and last.get("outcome", Outcome.RUNNING) == Outcome.RUNNING:
            found[str(stage.get("name"))] = str(last.get("job"))
    return found
