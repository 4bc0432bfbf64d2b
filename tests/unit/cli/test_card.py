"""The card of a run: what its sections say, and its size."""

import ast
import base64
import hashlib
import json
import re
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import pytest
import yaml
from support.cli.run_cards import (
    PageReader,
    ended_after,
    finished_record,
    numbers_of,
    pipeline_of,
    rows,
    with_status,
)
from support.operator.scenario import Scenario, a_pipeline

from finetune_cli.card.chart import Axis
from finetune_cli.card.page import page
from finetune_cli.card.record import RunRecord
from finetune_cli.card.timeline import Calendar, spans_of
from finetune_cli.card.usage import manifest_text
from finetune_operator.api.rules import STORED as STORED_SPEC
from finetune_operator.api.spec import PipelineSpec
from finetune_operator.api.status import PipelineStatus
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_trainer.contract.metric_rows import Row
from finetune_trainer.contract.sample_rows import SampleRow

LARGEST = 300_000
"""Bytes of a card."""
STORED = sorted((Path(__file__).parents[2] / "data" / "stored").glob("*.json"))
ALLOWED = """
html head meta title style body main header footer section article div span h1 h2 h3 h4 p ul li dl dt dd table caption
thead tbody tr th td pre code em figure figcaption details summary svg desc rect circle line text polyline polygon
"""
"""Elements of a card."""


@pytest.fixture(scope="module")
def record():
    return finished_record(steps=1000)


@pytest.fixture(scope="module")
def reader(record):
    return PageReader(page(record))


def test_card_says_what_was_asked_and_what_it_gave(reader):
    for text in (
        "demo",
        "Succeeded",
        "hf://org/base",
        "hf://org/data/train.jsonl",
        "SFT, LoRA of rank 16",
        "100 records → 42 rows",
        "1,000 steps, 1,000,000 tokens",
        "validation loss 0.6 at step 900",
        "pvc://models/demo",
        "hello",
    ):
        assert text in reader.text, text


def test_card_has_scores_before_and_after_with_errors(reader):
    assert "0.4 ± 0.025 before, 0.7 ± 0.02 after training: +0.3 ± 0.03." in reader.text
    assert "40 before, 12.5 after training: -27.5." not in reader.text
    assert "exam perplexity 40 12.5 -27.5" in reader.text
    assert "passed exam acc = 0.7 ± 0.02 is above 0.6" in reader.text


def test_base_model_that_was_not_measured_is_named():
    scenario = Scenario().run_before("evaluate").run("evaluate")
    text = PageReader(page(RunRecord(pipeline_of(scenario)))).text
    assert "The base model was not measured: evaluate.compareWithBase does so." in text
    assert "0.7 ± 0.02 after training." in text


def test_card_has_the_loss_with_its_interruptions(reader):
    assert "Training was interrupted at step 400, 700, and resumed." in reader.text
    assert "attempt 1 400 10 evicted" in reader.text
    assert ("line", "x1", "y1", "x2", "y2", "class") in reader.tags
    assert reader.values["class"].count("interruption") == 2
    # Only the first attempt lost steps.
    assert reader.values["class"].count("lost-steps") == 1


def test_curve_of_a_cluster_has_the_points_of_the_status(record):
    reader = PageReader(page(replace(record, rows=[])))
    text = "The training loss went from 4 to 0.4 in 1,000 steps."
    assert f"{text} The lowest validation loss is 0.75, at step 1,000." in reader.text


def test_timeline_has_waiting_running_and_lost_parts(reader):
    classes = reader.values["class"]
    assert classes.count("bar interrupted") == 2
    assert classes.count("lost") == 1
    assert "waiting" in classes
    assert "train 1" in reader.text
    assert "0 to 400 10 steps (1m)" in reader.text


def test_long_breaks_of_the_timeline_are_cut(record):
    short = Calendar(spans_of(record))
    long = Calendar(spans_of(ended_after(record, days=9)))
    assert not short.breaks
    [(_, idle)] = long.breaks
    assert idle == pytest.approx(9 * 24 * 3600, rel=0.01)
    assert long.length < 1.2 * short.length
    text = PageReader(page(ended_after(record, days=9))).text
    assert "Breaks of 9d, in which nothing waited or ran, are cut." in text


def test_places_of_the_charts_are_inside_of_them(record):
    for changed in (record, ended_after(record, days=9)):
        reader = PageReader(page(changed))
        for name in ("x", "x1", "x2", "cx"):
            assert all(0 <= place <= 100 for place in numbers_of(reader.values[name]))


def test_costs_go_from_on_demand_to_spent(record, reader):
    costs = record.status.costs
    assert costs
    assert costs.lost > 0
    cheaper = (costs.spent - costs.lost - costs.on_demand).quantize(Decimal("0.01"))
    assert f"cheaper nodes: {cheaper} {costs.currency}" in reader.text
    assert "prepare 1 1m 0s not known not known not known" in reader.text
    assert f"spent: {costs.spent:.2f} {costs.currency}" in reader.text
    assert f"lost to interruptions: {costs.lost:.2f} {costs.currency}" in reader.text


def test_card_without_prices_has_times_only():
    scenario = Scenario().finish()
    text = PageReader(page(RunRecord(pipeline_of(scenario)))).text
    assert "The prices of the nodes are not known" in text
    assert "On demand" not in text
    assert "train 1 1m 0s" in text


def test_samples_are_shown_before_and_after_training(reader):
    """After training is the step whose weights are the result, which is not the last step."""
    assert reader.text.count("Before training text of 0") == 2
    assert "After training (step 900, the result) text of 900" in reader.text
    assert "first prompt" in reader.text


def test_newest_sample_is_shown_if_the_best_step_has_none(record):
    samples = [SampleRow(0, "Hi", "before"), SampleRow(1000, "Hi", "")]
    text = PageReader(page(replace(record, samples=samples))).text
    assert "Before training before At step 1,000 no text" in text


def test_code_that_loads_the_model_is_a_program(reader):
    blocks = [text for text in reader.texts if "from_pretrained" in text]
    assert len(blocks) == 1
    ast.parse(blocks[0])
    assert "place = 'models/demo'" in blocks[0]


def test_code_of_an_adapter_attaches_it_to_its_base_model(record):
    stages = dict(record.status.stages)
    result = stages["push"].result
    target = result.published[0].model_copy(update={"format": "Adapter"})
    adapter = result.model_copy(update={"published": (target,)})
    stages["push"] = stages["push"].model_copy(update={"result": adapter})
    texts = PageReader(page(with_status(record, stages=stages))).texts
    [code] = [text for text in texts if "PeftModel.from_pretrained" in text]
    ast.parse(code)
    assert "base = 'org/base'" in code


def test_manifest_of_the_card_asks_for_the_same_results(record):
    secret = {
        "env": [{"name": "HF_TOKEN", "value": "hf_secret"}],
        "resources": {"limits": {"memory": "4Gi"}},
    }
    spec = a_pipeline(
        datasets=[{"uri": "https://example.org/data.jsonl?signature=secret"}],
        podDefaults=secret,
        train={"pod": secret, "lora": {"rank": 8}},
        tracking={"mlflow": {"uri": "https://host/?key=secret", "experiment": "e"}},
    )
    changed = replace(record, pipeline=replace(record.pipeline, spec=spec))
    manifest = yaml.safe_load(manifest_text(changed))
    read = PipelineSpec.model_validate(manifest["spec"])
    assert read.train.adapter == spec.train.adapter
    assert read.evaluate == spec.evaluate
    assert read.datasets[0].uri == "https://example.org/data.jsonl"
    assert "secret" not in page(changed)


def test_notes_about_the_results_are_on_the_card(record):
    stages = dict(record.status.stages)
    result = stages["prepare"].result.model_copy(update={"truncated": 50})
    stages["prepare"] = stages["prepare"].model_copy(update={"result": result})
    text = PageReader(page(with_status(record, stages=stages))).text
    assert "What may be wrong prepare: 50 of 100 records are truncated" in text


def test_page_loads_and_runs_nothing(record, reader):
    content = page(record)
    assert {tag for tag, *_ in reader.tags} <= set(ALLOWED.split())
    names = {name for _, *attributes in reader.tags for name in attributes}
    assert not names & {"src", "href", "style", "action", "srcset"}
    assert not [name for name in names if name.startswith("on")]
    [policy] = [value for value in reader.values["content"] if "default-src" in value]
    style = content.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'; ")
    assert not re.search(r"url\(|@import", style)


def test_page_is_well_formed_and_its_ids_are_unique(reader):
    assert reader.open == []
    ids = reader.values["id"]
    assert len(ids) == len(set(ids))
    for labels in reader.values["aria-labelledby"]:
        assert set(labels.split()) <= set(ids)


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario().reconcile_until_stable(),
        Scenario().run_before("train"),
        Scenario().run_before("evaluate"),
    ],
    ids=["new", "prepared", "trained"],
)
def test_card_of_an_unfinished_run_has_what_is_known(scenario):
    record = RunRecord(pipeline_of(scenario), at=scenario.cluster.now)
    reader = PageReader(page(record))
    assert reader.open == []
    assert "Asked and got" in reader.text


@pytest.mark.parametrize("file", STORED, ids=lambda file: file.stem)
def test_every_stored_status_has_a_card(file):
    """Statuses as the operator has written them, also an earlier version of it."""
    for stored in json.loads(file.read_text()):
        pipeline = Pipeline(
            Key("team", stored["name"]),
            "uid",
            stored["generation"],
            PipelineSpec.model_validate(stored["spec"], context=STORED_SPEC),
            status=PipelineStatus.model_validate(stored["status"]),
        )
        now = datetime.fromisoformat(stored["now"])
        reader = PageReader(page(RunRecord(pipeline, at=now)))
        assert reader.open == []
        assert f"{stored['name']} {pipeline.status.phase}" in reader.text
        assert len(reader.text) > 500


def test_card_of_a_finished_run_is_the_same_at_any_time(record):
    later = replace(record, at=None)
    assert page(later) == page(record)


@pytest.mark.parametrize("steps", [10_000, 1])
def test_card_of_a_long_training_stays_small(record, steps):
    assert len(page(replace(record, rows=rows(steps))).encode()) < LARGEST


@pytest.mark.parametrize(
    "losses",
    [[0.0], [2.5, 2.5], [1e300, -1e300], [1e-300, 1e15], [-1.0, -2.0], [5e-324, 0.0]],
)
def test_any_losses_are_drawn_inside_the_chart(record, losses):
    made = [Row(step, 0.0, {"loss": loss}) for step, loss in enumerate(losses, 1)]
    reader = PageReader(page(replace(record, rows=made)))
    for points in reader.values["points"]:
        for point in points.split():
            x, y = (float(number) for number in point.split(","))
            assert 0 <= x <= 1000
            assert 0 <= y <= 300


@pytest.mark.parametrize(
    ("axis", "ticks"),
    [
        (Axis(0, 10), [0, 2, 4, 6, 8, 10]),
        (Axis(-1, 1), [-1, -0.5, 0, 0.5, 1]),
        (Axis(0.3, 5, is_logarithmic=True), [0.5, 1, 2, 5]),
    ],
)
def test_ticks_are_round_and_inside(axis, ticks):
    assert axis.ticks() == pytest.approx(ticks)
    assert [axis.share(axis.low), axis.share(axis.high)] == [0, 1]
