"""What a run would do, stage by stage, and why: said before anything runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from finetune_cli.laptop import Laptop, with_spec
from finetune_operator.api.spec import PipelineSpec
from finetune_operator.api.status import StageState
from finetune_operator.pipeline import Pipeline
from finetune_operator.stages.base import StageSpec
from finetune_operator.state import StageView, assess

Doing = Literal["reuse", "run", "resume", "skip", "stay"]
NO_WORK = frozenset({"config.json", "server.log"})
DISTANT = ("image", "resources", "placement")
"""What a stage says to a cluster and a laptop cannot obey."""


@dataclass(frozen=True)
class Forecast:
    """One stage."""

    stage: str
    doing: Doing
    why: str
    identity: str = ""


async def forecast(laptop: Laptop) -> list[Forecast]:
    """Foretell every stage; nothing is written and nothing started."""
    now = datetime.now(UTC)  # noqa: TID251  an edge
    cluster = laptop.cluster
    before = cluster.store.read()
    after = with_spec(before, laptop.manifest) if before else Pipeline(laptop.key, "0" * 8, 1, laptop.manifest.spec)
    observed = await cluster.observe(after)
    view = assess(after, observed, now)
    old = assess(before, observed, now).stages if before else {}
    workspace = cluster.folders.workspace(after)
    found: list[Forecast] = []
    for name, stage in view.stages.items():
        stays = [need for need in (stage.spec.needs if stage.spec else ()) if need in _that(found, "stay")]
        held = "spec.suspend is true" if after.spec.suspend else f"waits for {stays[0]}" if stays else ""
        if held and not _settled(stage):
            found.append(Forecast(name, "stay", held, stage.status.identity))
        else:
            again = _that(found, "run", "resume")
            found.append(_of_stage(name, stage, old.get(name), workspace, again))
    return found


def _that(found: Sequence[Forecast], *doing: Doing) -> set[str]:
    return {one.stage for one in found if one.doing in doing}


def _of_stage(name: str, now: StageView, old: StageView | None, workspace: Path, again: set[str]) -> Forecast:
    doing, why = _settled(now) or _to_do(name, now, old, workspace / name / now.status.identity, again)
    return Forecast(name, doing, why, now.status.identity)


def _settled(now: StageView) -> tuple[Doing, str] | None:
    """Tell the stage that will not start a process."""
    match now.status.state:
        case StageState.SUCCEEDED:
            return "reuse", f"done already{_took(now.status.active_seconds)}"
        case StageState.SKIPPED:
            return "skip", now.status.message
        case StageState.FAILED:
            return "stay", f"failed: {now.status.message}; `finetune retry` starts it again"
        case StageState.PENDING | StageState.QUEUED | StageState.RUNNING:
            return None


def _to_do(name: str, now: StageView, old: StageView | None, folder: Path, again: set[str]) -> tuple[Doing, str]:
    why = _why(name, now, old, [need for need in (now.spec.needs if now.spec else ()) if need in again])
    if (folder / "result.json").is_file():
        return "reuse", "its result is in the workspace"
    if _has_work(folder):
        return "resume", f"{why}; goes on from what an earlier attempt has kept"
    return "run", why


def _took(seconds: float) -> str:
    return f", took {seconds:.0f} s" if seconds else ""


def _has_work(folder: Path) -> bool:
    """Whether a file of an earlier attempt is there; what begins with a dot was never finished."""
    files = (path.relative_to(folder).parts for path in folder.rglob("*") if path.is_file())
    return any(parts[-1] not in NO_WORK and not any(part.startswith(".") for part in parts) for parts in files)


def _why(name: str, now: StageView, old: StageView | None, waits_for: list[str]) -> str:
    if old is None or old.config is None or not old.status.identity:
        return f"after {waits_for[-1]}" if waits_for else "not run yet"
    if changes := list(_changes(f"spec.{name}", _own(now.spec), _own(old.spec))):
        return ", ".join(changes[:3]) + (f" and {len(changes) - 3} more" if len(changes) > 3 else "")  # noqa: PLR2004
    if waits_for:
        return f"{waits_for[-1]} is run again"
    return "a source has changed" if now.status.identity != old.status.identity else "not finished yet"


def _own(spec: StageSpec | None) -> dict[str, Any]:
    return spec.model_dump(mode="json", by_alias=True, exclude_none=True) if spec else {}


def _changes(path: str, new: Any, old: Any) -> Iterator[str]:
    if isinstance(new, dict) and isinstance(old, dict):
        for key in sorted({*new, *old}):
            yield from _changes(f"{path}.{key}", new.get(key), old.get(key))
    elif new != old:
        yield f"{path}: {_said(old)} → {_said(new)}"


def _said(value: Any) -> str:
    return "absent" if value is None else str(value)


def without_effect(spec: PipelineSpec) -> list[str]:
    """Name the fields that were written for a cluster and change nothing on a laptop."""
    stages = spec.stages().items()
    return [f"spec.{name}.{field}" for name, stage in stages for field in DISTANT if field in stage.model_fields_set]
