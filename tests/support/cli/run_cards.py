"""Records of runs for the tests of the card, and a reader of its HTML."""

import math
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from html.parser import HTMLParser
from typing import Any

from pydantic import BaseModel
from support.operator.placements import H100, interrupt, training
from support.operator.scenario import Scenario

from finetune_cli.card.record import RunRecord
from finetune_operator.api.status import PipelineStatus
from finetune_operator.core.pipeline import Pipeline
from finetune_trainer.contract import LossCurve, ValidationPoint
from finetune_trainer.contract.metric_rows import Row
from finetune_trainer.contract.sample_rows import SampleRow

SCORES = {
    "exam": {
        "acc": {"value": 0.7, "stderr": 0.02, "base": 0.4, "differenceStderr": 0.03},
        "perplexity": {"value": 12.5, "base": 40.0},
    }
}
CURVE = LossCurve(
    every_steps=100,
    step=1000,
    losses=tuple(4.0 / number for number in range(1, 11)),
    validations=(
        ValidationPoint(step=500, loss=1.5),
        ValidationPoint(step=1000, loss=0.75),
    ),
)
KEPT = frozenset({"format", "capacity", "type"})
"""Fields that stay as they are when texts are replaced: the card decides by them."""
VOID = frozenset({"meta", "br"})


def interrupted_scenario() -> Scenario:
    """Return a finished pipeline whose training was evicted at steps 400 and 700, on nodes with prices."""
    scenario = training(
        *H100, placement={"capacity": "Spot"}, samples={"prompts": ["Hi"]}
    )
    interrupt(scenario, 40, start=0, last=400, saved=390)
    scenario.after(600)
    interrupt(scenario, 31, start=390, last=700, saved=700)
    job = scenario.start("train")
    scenario.cluster.progress(job, 1000, start_step=700, total=1000, loss_curve=CURVE)
    scenario.after(1800).reconcile_until_stable()
    scenario.complete("train")
    scenario.run("evaluate", scores=SCORES)
    return scenario.finish()


def pipeline_of(scenario: Scenario) -> Pipeline:
    return Pipeline(scenario.key, "uid-1", 1, scenario.spec, status=scenario.status)


def finished_record(steps: int = 0, **changes: Any) -> RunRecord:
    """Return a record of the interrupted pipeline, with so many rows of metrics."""
    scenario = interrupted_scenario()
    record = RunRecord(
        pipeline_of(scenario),
        rows=rows(steps),
        samples=[
            SampleRow(step, prompt, f"text of {step}")
            for step in (0, 500, 900, 1000)
            for prompt in ("first prompt", "second prompt")
        ],
        base_errors={("exam", "acc"): 0.025},
        folders={"pvc://models/demo": "models/demo"},
        serve_commands=("finetune run demo --keep-serving",),
        reproduce_command="finetune run demo",
        at=scenario.cluster.now,
        version="0.1.0",
    )
    return replace(record, **changes)


def rows(steps: int) -> list[Row]:
    """Return metrics of so many steps, with a validation every hundred steps."""
    made = []
    for step in range(1, steps + 1):
        values = {"loss": 4.0 * math.exp(-step / steps) + 0.05 * math.sin(step)}
        if step % 100 == 0:
            values["validation_loss"] = 4.2 * math.exp(-step / steps)
        made.append(Row(step, float(step), values))
    return made


def with_status(record: RunRecord, **changes: Any) -> RunRecord:
    status = record.status.model_copy(update=changes)
    return replace(record, pipeline=replace(record.pipeline, status=status))


def with_text(record: RunRecord, text: str) -> RunRecord:
    """Return the record with this text in place of every text that a user, a program or a cluster may have written."""
    pipeline = record.pipeline
    changed = replace(
        pipeline,
        key=replace(pipeline.key, namespace=text, name=text),
        uid=text,
        spec=replace_texts(pipeline.spec, text),
        status=replace_texts(pipeline.status, text),
    )
    rows = [SampleRow(row.step, text, text) for row in record.samples]
    return replace(
        record,
        pipeline=changed,
        samples=rows,
        folders={text: text},
        serve_commands=(text,),
        reproduce_command=text,
        version=text,
    )


def replace_texts(value: Any, text: str) -> Any:
    """Return a model, or a part of it, with another text in place of each text; nothing is validated."""
    if isinstance(value, BaseModel):
        fields = {
            name: replace_texts(getattr(value, name), text)
            for name in type(value).model_fields
            if name not in KEPT
        }
        if isinstance(value, PipelineStatus):
            fields["stages"] = {
                name: replace_texts(stage, text) for name, stage in value.stages.items()
            }
        return value.model_copy(update=fields)
    if isinstance(value, Enum) or not isinstance(value, (str, tuple, dict)):
        return value
    if isinstance(value, str):
        return text
    if isinstance(value, tuple):
        return tuple(replace_texts(item, text) for item in value)
    # A number makes the names differ.
    return {
        f"{text}{number}": replace_texts(item, text)
        for number, item in enumerate(value.values())
    }


class PageReader(HTMLParser):
    """Reads a page as a browser does: its tags with the names of their attributes, and its texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, ...]] = []
        self.values: dict[str, list[str]] = {}
        """Name of an attribute -> its values."""
        self.open: list[str] = []
        self.texts: list[str] = []
        self.ids: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, *(name for name, _ in attrs)))
        for name, value in attrs:
            self.values.setdefault(name, []).append(value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data}")

    @property
    def text(self) -> str:
        """All texts, with single blanks."""
        return " ".join(" ".join(self.texts).split())


def ended_after(record: RunRecord, days: int) -> RunRecord:
    """Return the record with the stages behind training moved by some days, as after an edit of evaluate."""
    later = timedelta(days=days)
    stages = dict(record.status.stages)
    for name in ("evaluate", "push", "deploy"):
        attempts = [_moved(attempt, later) for attempt in stages[name].attempts]
        stages[name] = stages[name].model_copy(update={"attempts": tuple(attempts)})
    return with_status(record, stages=stages)


def _moved(attempt: Any, later: timedelta) -> Any:
    times = ("created_at", "started_at", "finished_at")
    moved = {name: getattr(attempt, name) + later for name in times}
    return attempt.model_copy(update=moved)


def numbers_of(values: Iterable[str]) -> list[float]:
    """Return the numbers of lengths in percent."""
    return [float(value.removesuffix("%")) for value in values if value.endswith("%")]
