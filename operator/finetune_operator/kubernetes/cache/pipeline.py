"""A pipeline in the cache: small, and parsed only while it is worked on."""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from finetune_operator.api.conditions import READY, Reason
from finetune_operator.api.spec import STAGES
from finetune_operator.api.status import Outcome, StageState
from finetune_operator.core.metadata import workspace_name
from finetune_operator.core.observation import ClaimUser
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.core.workspace import WRITING_STAGES
from finetune_operator.kubernetes import fast_json
from finetune_operator.kubernetes.cache.store import Store
from finetune_operator.kubernetes.pipeline_object import READ_ANNOTATIONS
from finetune_operator.kubernetes.translate.object import Object
from finetune_trainer.result_folders import names_in

STAGE_CONDITIONS = frozenset(kind.condition for kind in STAGES)
# Only known texts become labels of metrics: anyone may write a status, and each new label is a new series.
REASONS = {reason.value: reason.value for reason in Reason}
STAGE_NAMES = {kind.name: kind.name for kind in STAGES}


@dataclass(frozen=True, slots=True)
class WaitingStage:
    """The stage whose turn it is, while its process has not started, or its node does not answer."""

    stage: str
    reason: str
    """One of Reason; empty for a reason that this version does not know."""
    since: float | None
    """Unix time of the last change before: a start or an end of a process, or a change of a condition.

    None for a process whose node does not answer: the status does not say since when.
    """


@dataclass(frozen=True, slots=True)
class CachedPipeline:
    """The facts that are read of many pipelines at once, and the object's text for the rest."""

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
    """Whether a running attempt writes to the workspace."""
    text: bytes
    """The object as compressed JSON, with the annotations that the operator reads: a user may make an object large.
    Empty if `parsed` has the object."""
    unreadable: bool = False
    """Whether the operator has written that it cannot read the object."""
    waiting: WaitingStage | None = None
    """None: a process runs, or the pipeline is suspended, has finished or is unreadable. A lost node comes before."""
    parsed: Pipeline | None = None
    """The parsed object, while the pipeline has not finished."""
    read_results: tuple[tuple[str, str], ...] = ()
    """Claim and STAGE/IDENTITY of each result that the spec names by its path in a workspace."""

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
        return (
            ended or (self.writing and not after.writing) or self.claim != after.claim
        )

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
    def read_claims(self) -> frozenset[tuple[str, str]]:
        """Namespace and name of the claims whose results the spec names by their paths."""
        namespace = self.key.namespace
        return frozenset((namespace, claim) for claim, _ in self.read_results)

    @property
    def lets_others_go_first(self) -> bool:
        """Whether a younger pipeline with the claim need not wait: this pipeline starts nothing as it is now."""
        return self.finished or self.deleting or self.suspended

    def content(self) -> Object:
        """Return the object."""
        content: Object = fast_json.decode(zlib.decompress(self.text))
        return content

    @property
    def seniority(self) -> tuple[str, str]:
        """Creation time and uid: the smaller is older."""
        return self.created_at, self.uid


def has_running_attempt(pipelines: Store[CachedPipeline], key: Key) -> bool:
    """Return whether an attempt of the pipeline runs, as its status has it."""
    pipeline = pipelines.get((key.namespace, key.name))
    return pipeline is not None and bool(pipeline.running_jobs)


def trim_pipeline(raw: Object, parsed: Pipeline | None = None) -> CachedPipeline:
    """Return a pipeline as the cache keeps it; `parsed` is the same object if it is to be kept so."""
    meta = raw["metadata"]
    spec = raw.get("spec") or {}
    status = raw.get("status") or {}
    own = {
        name: value
        for name, value in (meta.get("annotations") or {}).items()
        if name in READ_ANNOTATIONS
    }
    kept = _kept_metadata(meta, status, own)
    running = _running_jobs(status)
    workspace = spec.get("workspace") or {}
    suspended = spec.get("suspend") is True
    finished = bool(status.get("finishedAt"))
    unreadable = _is_unreadable(status)
    text = b""
    if parsed is None:
        content = {"metadata": kept, "spec": spec, "status": status}
        # The fastest level: a pipeline is compressed at each of its changes.
        text = zlib.compress(fast_json.encode(content), level=1)
    waiting = None
    if not (finished or unreadable):
        waiting = _waiting_stage(meta, status, suspended=suspended)
    return CachedPipeline(
        key=Key(meta["namespace"], meta["name"]),
        uid=meta["uid"],
        generation=meta.get("generation", 0),
        annotations=tuple(sorted(own.items())),
        deleting="deletionTimestamp" in meta,
        claim=workspace.get("existingClaim") or workspace_name(meta["name"]),
        created_at=str(meta.get("creationTimestamp")),
        finished=finished,
        suspended=suspended,
        phase=str(status.get("phase") or "Pending"),
        running_jobs=frozenset(running.values()),
        writing=not WRITING_STAGES.isdisjoint(running),
        text=text,
        unreadable=unreadable,
        waiting=waiting,
        parsed=parsed,
        read_results=tuple(_read_results(spec)),
    )


def _read_results(spec: Object) -> Iterator[tuple[str, str]]:
    """Yield the claim and STAGE/IDENTITY of each result that a URI of the spec names. The spec may be malformed."""
    for text in _texts(spec):
        if text.startswith("pvc://"):
            claim, _, path = text.removeprefix("pvc://").partition("/")
            yield from ((claim, name) for name in names_in([f"/{path}"]))


def _texts(value: Any) -> Iterator[str]:
    """Yield each text in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for element in value.values():
            yield from _texts(element)
    elif isinstance(value, list):
        for element in value:
            yield from _texts(element)


def _kept_metadata(meta: Object, status: Object, own: Mapping[str, str]) -> Object:
    """Return the metadata that the operator reads, with its own annotations."""
    names = (
        "name",
        "namespace",
        "uid",
        "generation",
        "resourceVersion",
        "creationTimestamp",
        "deletionTimestamp",
    )
    kept = {name: meta[name] for name in names if name in meta}
    # They say whether a new object was created with its annotations.
    if own and not status.get("observedVersion"):
        kept["managedFields"] = meta.get("managedFields") or []
    return {**kept, "annotations": dict(own)}


def _is_unreadable(status: Object) -> bool:
    """Return whether the operator could not read the object: only then it writes no condition of a stage.

    The rest of the status is about an earlier spec.
    """
    conditions = _objects(status.get("conditions"))
    kinds = {str(condition.get("type")) for condition in conditions}
    return READY in kinds and kinds.isdisjoint(STAGE_CONDITIONS)


def _waiting_stage(
    meta: Object, status: Object, *, suspended: bool
) -> WaitingStage | None:
    """Return the stage that waits, or None. The status may be malformed: anyone may write it."""
    stages = _objects(status.get("stages"))
    current = _current_stage(status, stages)
    name = STAGE_NAMES.get(str(current.get("name")))
    if name is None:
        return None
    state = current.get("state")
    reason = current.get("reason")
    if state == StageState.RUNNING and reason == Reason.NODE_LOST:
        return WaitingStage(name, Reason.NODE_LOST.value, None)
    if suspended or state not in {StageState.PENDING, StageState.QUEUED}:
        return None
    since = max(_times(meta, status, stages), default=None)
    if since is None:
        return None
    return WaitingStage(name, REASONS.get(str(reason), ""), since)


def _current_stage(status: Object, stages: list[Object]) -> Object:
    for stage in stages:
        if stage.get("name") == status.get("stage"):
            return stage
    return {}


def _times(meta: Object, status: Object, stages: list[Object]) -> Iterator[float]:
    """Yield when the pipeline was created, when its processes began and ended, and when its conditions changed.

    Attempts whose process has never started are part of the wait: they give up their nodes and request them again.
    """
    attempts = [
        attempt for stage in stages for attempt in _objects(stage.get("attempts"))
    ]
    texts = [meta.get("creationTimestamp")]
    for attempt in attempts:
        if attempt.get("startedAt"):
            times = ("startedAt", "suspendedAt", "resumedAt", "finishedAt")
            texts += [attempt.get(time) for time in times]
    for condition in _objects(status.get("conditions")):
        texts.append(condition.get("lastTransitionTime"))
    for text in texts:
        time = _unix_time(text)
        if time is not None:
            yield time


def _objects(value: Any) -> list[Object]:
    if not isinstance(value, list):
        return []
    return [element for element in value if isinstance(element, dict)]


def _unix_time(text: Any) -> float | None:
    try:
        time = datetime.fromisoformat(text)
        if time.tzinfo is None:
            # Python would take it for local time.
            time = time.replace(tzinfo=UTC)
        return time.timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def _running_jobs(status: Object) -> dict[str, str]:
    """Return the Job of each stage whose last attempt is running. The status may be malformed: anyone may write it."""
    jobs: dict[str, str] = {}
    for stage in _objects(status.get("stages")):
        attempts = stage.get("attempts")
        last = attempts[-1] if isinstance(attempts, list) and attempts else None
        # The default of `outcome` is Running; the operator writes it always.
        if (
            isinstance(last, dict)
            and last.get("outcome", Outcome.RUNNING) == Outcome.RUNNING
        ):
            jobs[str(stage.get("name"))] = str(last.get("job"))
    return jobs
