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
from finetune_cli.comparison.compare import TRAINING_LOSS
from finetune_cli.outcome import ready_message
from finetune_cli.output.model_text import short_digest
from finetune_cli.output.notes import notes_of
from finetune_cli.output.results import records_text, score_texts
from finetune_operator.api.spec import PipelineSpec
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
from finetune_trainer.contract.results import LAST_STEPS
from finetune_trainer.contract.uris import without_secrets

# A mixture may have a hundred data sets, and a card has to stay small.
LISTED = 12
"""Data sets, tasks and targets that a cell lists."""
NOT_SHOWN = set(StageSpec.model_fields)
"""Fields of each stage that say where it runs, and not what it does. Pods may hold tokens."""
# Maps such as chatTemplateArguments may have any number of keys.
SETTINGS = 120
"""Settings in the table at most."""
REFERENCE = re.compile(r" \(see [^()]*\)$")
"""Matches the reference to the documentation at the end of a message."""


def heading(record: RunRecord) -> Markup:
    """Return the name, the phase and the most important numbers."""
    key = record.pipeline.key
    place = f"{shortened(key.namespace)} · fine-tuning run"
    name = element("h1", shortened(key.name))
    return element(
        "header",
        element("p", place, class_="remark"),
        join((name, badge(record.status.phase)), " "),
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
        scores = list(score_texts(result))
        # One is enough for a glance; the section about scores has all.
        for text in scores[:1]:
            yield _number("score", shortened(text, 80))
    training = record.stage("train").result
    if isinstance(training, TrainResult):
        loss = training.validation_loss
        if loss is not None:
            yield _number("validation loss", f"{loss:.4g}")
    interruptions = f"{status.interruptions} ({status.lost_steps:,} steps lost)"
    yield _number("interruptions", interruptions)
    if status.spent:
        yield _number("spent", shortened(status.spent, 80))


def _number(name: str, value: str) -> Markup:
    return element("div", element("dt", name), element("dd", value))


def overview_section(record: RunRecord) -> Markup:
    """Return what was asked for beside what it gave, by stage, and all settings of the training."""
    rows = []
    for name, asked in _asked(record).items():
        rows.append((name, asked, _got(record, name)))
    notes = [
        f"{note.stage}: {shortened(note.message)}" for note in notes_of(record.status)
    ]
    warning = listing(notes, "notes")
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
    """Return the requests by stage, in the order of the stages."""
    spec = record.pipeline.spec
    data = [_uri(dataset.uri) for dataset in spec.datasets]
    length = f"at most {spec.prepare.context_length:,} tokens a row"
    asked: dict[str, Content] = {
        "prepare": _items([*data, length]),
        "train": _training_asked(spec),
    }
    if spec.evaluate:
        tasks = spec.evaluate.tasks
        requests = [f"task {shortened(task.name, 128)}" for task in tasks]
        for gate in spec.evaluate.gates:
            score = f"{shortened(gate.task, 128)} {gate.metric}"
            requests.append(f"gate {score}: {gate.operator} {gate.value:g}")
        asked["evaluate"] = _items(requests)
    if spec.push:
        targets = [_uri(target.uri) for target in spec.push.targets]
        asked["push"] = _items(targets)
    if spec.deploy:
        prompt = code(spec.deploy.smoke_test.prompt)
        asked["deploy"] = _items(["an answer to the prompt", prompt])
    return asked


def _training_asked(spec: PipelineSpec) -> Markup:
    train = spec.train
    method = f"{train.objective}, {train.method}"
    if train.method != "Full":
        method += f" of rank {train.adapter.rank}"
    amount = ""
    if train.max_steps:
        amount = f"{train.max_steps:,} steps"
    # One, if the manifest has neither steps nor epochs.
    epochs = train.effective_epochs()
    if epochs:
        amount = "1 epoch" if epochs == 1 else f"{epochs:g} epochs"
    rate = f"learning rate {train.optimizer.learning_rate:g}"
    base = _uri(spec.model.uri)
    return _items([base, method, amount, rate])


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
            for text in score_texts(stage.result):
                parts.append(shortened(text, 160))
        case PushResult():
            for target in stage.result.published:
                digest = short_digest(target.digest)
                size = f"{target.format}, {target.size:,} bytes, {digest}"
                parts.append(join((_uri(target.uri), size), " "))
        case DeployResult():
            parts.append(code(stage.result.answer, 300))
        case _:
            parts.append(shortened(stage.message))
    return _items(parts)


def _trained(result: TrainResult) -> list[str]:
    parts = [f"{result.steps:,} steps, {result.tokens:,} tokens"]
    parts.append(f"{TRAINING_LOSS} {result.loss:.4g}, {LAST_STEPS}")
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
    cells = []
    for name, value in rows[:SETTINGS]:
        cells.append((shortened(name, 100), code(value)))
    return table("Settings", ("Field", "Value"), cells)


def flattened(value: dict[str, object], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield all values below a field, by dotted name; URLs have no user names and no queries."""
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, dict):
            yield from flattened(inner, f"{name}.")
        elif isinstance(inner, list):
            items = [without_secrets(item) for item in inner]
            yield name, ", ".join(items)
        elif isinstance(inner, bool):
            # As in the manifest.
            yield name, str(inner).lower()
        else:
            yield name, without_secrets(inner)
