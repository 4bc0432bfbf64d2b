"""The beginning of a card: how the run ended, what was asked for and what it gave."""

import re
from collections.abc import Iterable, Iterator

from finetune_cli.card.markup import (
    Content,
    Markup,
    badge,
    code,
    details,
    element,
    join,
    listing,
    section,
    shortened,
    table,
)
from finetune_cli.card.record import RunRecord
from finetune_cli.outcome import ready_message
from finetune_cli.output.notes import notes_of
from finetune_cli.output.results import records_text, score_texts
from finetune_operator.api.spec import STAGES
from finetune_operator.api.stages.base import StageSpec
from finetune_operator.api.status import StageState
from finetune_operator.core.durations import format_duration
from finetune_trainer.contract import (
    DeployResult,
    EvaluateResult,
    PrepareResult,
    PushResult,
    TrainResult,
)
from finetune_trainer.contract.uris import without_secrets

LISTED = 12
"""Data sets, tasks and targets that a cell lists."""
NOT_SHOWN = set(StageSpec.model_fields)
"""Fields of each stage that say where it runs, and not what it does. Pods may hold tokens."""
SETTINGS = 120
"""Settings in the table at most."""
REFERENCE = re.compile(r" \(see [^()]*\)$")
"""Matches the reference to the documentation at the end of a message."""
SHORT_DIGEST = 19
"""sha256: and twelve digits."""


def heading(record: RunRecord) -> Markup:
    """Return the name, the phase and the most important numbers."""
    status = record.status
    key = record.pipeline.key
    return element(
        "header",
        element("p", f"{shortened(key.namespace)} · fine-tuning run", class_="remark"),
        join((element("h1", shortened(key.name)), badge(status.phase)), " "),
        element("p", shortened(_outcome(record))),
        element("dl", *_numbers(record), class_="tiles"),
    )


def _outcome(record: RunRecord) -> str:
    for name, stage in record.status.stages.items():
        if stage.state is StageState.FAILED:
            return f"{name} failed: {stage.message}"
    # A card is read where the documentation is not, and its file is not either.
    return REFERENCE.sub("", ready_message(record.status))


def _numbers(record: RunRecord) -> Iterator[Markup]:
    status = record.status
    end = status.finished_at or record.at
    if status.started_at and end:
        seconds = (end - status.started_at).total_seconds()
        yield _number("time in all", format_duration(seconds))
    result = record.stage("evaluate").result
    if isinstance(result, EvaluateResult):
        for text in list(score_texts(result))[:1]:
            yield _number("score", shortened(text, 80))
    training = record.stage("train").result
    if isinstance(training, TrainResult) and training.validation_loss is not None:
        yield _number("validation loss", f"{training.validation_loss:.4g}")
    lost = f"{status.lost_steps:,} steps lost"
    yield _number("interruptions", f"{status.interruptions} ({lost})")
    if status.spent:
        yield _number("spent", shortened(status.spent, 80))


def _number(name: str, value: str) -> Markup:
    return element("div", element("dt", name), element("dd", value))


def overview_section(record: RunRecord) -> Markup:
    """Return what was asked for beside what it gave, by stage, and all settings of the training."""
    asked = _asked(record)
    rows = [
        (kind.name, asked[kind.name], _got(record, kind.name))
        for kind in STAGES
        if kind.name in asked
    ]
    notes = [
        f"{note.stage}: {shortened(note.message)}" for note in notes_of(record.status)
    ]
    warning: Markup = listing(notes, "notes")
    if notes:
        warning = join((element("h3", "What may be wrong"), warning))
    return section(
        "overview",
        "Asked and got",
        table("Each stage", ("Stage", "Asked", "Got"), rows, "texts"),
        warning,
        details("All settings of prepare and train", _settings(record)),
    )


def _asked(record: RunRecord) -> dict[str, Content]:
    """Return the requests by stage."""
    spec = record.pipeline.spec
    train = spec.train
    data = [_uri(dataset.uri) for dataset in spec.datasets]
    length = f"at most {spec.prepare.context_length:,} tokens a row"
    amount = f"{train.max_steps:,} steps" if train.max_steps else ""
    epochs = train.effective_epochs()
    if epochs:
        amount = "1 epoch" if epochs == 1 else f"{epochs:g} epochs"
    method = f"{train.objective}, {train.method}"
    if train.method != "Full":
        method += f" of rank {train.adapter.rank}"
    rate = f"learning rate {train.optimizer.learning_rate:g}"
    asked: dict[str, Content] = {
        "prepare": _items([*data, length]),
        "train": _items([_uri(spec.model.uri), method, amount, rate]),
    }
    if spec.evaluate:
        tasks = [f"task {shortened(task.name, 128)}" for task in spec.evaluate.tasks]
        gates = [
            f"gate {shortened(gate.task, 128)} {gate.metric}: {gate.operator} {gate.value:g}"
            for gate in spec.evaluate.gates
        ]
        asked["evaluate"] = _items([*tasks, *gates])
    if spec.push:
        asked["push"] = _items(_uri(target.uri) for target in spec.push.targets)
    if spec.deploy:
        prompt = code(spec.deploy.smoke_test.prompt)
        asked["deploy"] = _items(["an answer to the prompt", prompt])
    return asked


def _items(parts: Iterable[Content]) -> Markup:
    """Return the parts as a list; of many, the first."""
    entries = [part for part in parts if part]
    more = len(entries) - LISTED
    entries = entries[:LISTED]
    if more > 0:
        entries.append(f"and {more} more")
    return listing(entries, "plain")


def _uri(uri: str) -> Markup:
    return code(without_secrets(uri))


def _got(record: RunRecord, name: str) -> Content:
    stage = record.stage(name)
    parts: list[Content] = [badge(stage.state)]
    match stage.result:
        case PrepareResult():
            parts.append(records_text(stage.result))
        case TrainResult():
            parts += _trained(stage.result)
        case EvaluateResult():
            parts += [shortened(text, 160) for text in score_texts(stage.result)]
        case PushResult():
            for target in stage.result.published:
                digest = target.digest[:SHORT_DIGEST]
                size = f"{target.format}, {target.size:,} bytes, {digest}…"
                parts.append(join((_uri(target.uri), size), " "))
        case DeployResult():
            parts.append(code(stage.result.answer, 300))
        case _:
            parts.append(shortened(stage.message))
    return _items(parts)


def _trained(result: TrainResult) -> list[str]:
    parts = [f"{result.steps:,} steps, {result.tokens:,} tokens"]
    parts.append(f"training loss {result.loss:.4g}, mean of the last steps")
    if result.validation_loss is not None:
        best = f"step {result.best_step:,}"
        parts.append(f"validation loss {result.validation_loss:.4g} at {best}")
    return parts


def _settings(record: RunRecord) -> Markup:
    spec = record.pipeline.spec
    rows = [("seed", str(spec.seed))]
    for name in ("prepare", "train"):
        fields = getattr(spec, name).model_dump(
            mode="json", by_alias=True, exclude_none=True, exclude=NOT_SHOWN
        )
        rows += flattened(fields, f"{name}.")
    cells = [(shortened(name, 100), code(value)) for name, value in rows]
    return table("Settings", ("Field", "Value"), cells[:SETTINGS])


def flattened(value: dict[str, object], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield all values below a field, by dotted name; URLs have no user names and no queries."""
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from flattened(inner, f"{prefix}{name}.")
        elif isinstance(inner, list):
            yield f"{prefix}{name}", ", ".join(without_secrets(item) for item in inner)
        elif isinstance(inner, bool):
            # As in the manifest.
            yield f"{prefix}{name}", str(inner).lower()
        else:
            yield f"{prefix}{name}", without_secrets(inner)
