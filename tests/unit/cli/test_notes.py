"""A stage that succeeded and may have ended badly: its line and its notes, from the status alone."""

import io
import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console
from support.operator.scenario import Scenario

from finetune_cli.output.notes import NoteReason, notes_of
from finetune_cli.output.status.tree import live_table
from finetune_cli.output.table import row
from finetune_operator.core.pipeline import Key
from finetune_operator.local.pipeline_file import PipelineFile
from finetune_trainer.contract import LossCurve, Progress, ValidationPoint

ROOT = Path(__file__).parents[3]
NOW = datetime(2030, 1, 2, tzinfo=UTC)
CUT = {
    "records": 200,
    "truncated": 200,
    "invalid": 0,
    "trainRows": 183,
    "validationRows": 10,
}
PAIRED = {"value": 0.4766, "stderr": 0.03, "base": 0.1719, "differenceStderr": 0.0341}


def exam(**metrics):
    return {"scores": {"exam": metrics}}


def finished(**results):
    return Scenario().finish(**results).status


def trained(losses=(2.0, 1.0), validations=(), accuracy=None, **result):
    """Return a finished status whose training had these losses, validations and result."""
    status = finished(train=result)
    points = tuple(ValidationPoint(step=step, loss=loss) for step, loss in validations)
    curve = LossCurve(
        every_steps=10,
        step=10 * len(losses),
        losses=losses,
        validations=points,
    )
    progress = Progress(
        stage="train", updated_at=NOW, step=10, reward_accuracy=accuracy
    )
    stage = status.stages["train"].model_copy(
        update={"loss_curve": curve, "progress": progress}
    )
    return status.model_copy(update={"stages": {**status.stages, "train": stage}})


def reasons(status):
    return [note.reason for note in notes_of(status)]


def shown(status, *, color=False):
    """Return the tree as it is printed, with the codes of colours on a terminal."""
    file = io.StringIO()
    Console(
        file=file,
        width=300,
        force_terminal=color,
        color_system="standard" if color else None,
        soft_wrap=True,
    ).print(live_table("demo", status))
    return file.getvalue()


def line_of(stage, text):
    for line in text.splitlines():
        if f" {stage} " in line:
            return line
    raise AssertionError(f"no line of {stage}: {text}")


def test_training_that_went_well_has_no_notes():
    status = trained(losses=(3.0, 2.0, 1.9, 1.95), validations=[(10, 2.1), (40, 2.0)])
    assert reasons(status) == []
    assert "note:" not in shown(status)


def test_truncated_records_are_in_the_line_of_prepare_in_yellow():
    status = finished(prepare=CUT)
    text = "200 records → 193 rows, 200 truncated (100 %)"
    assert line_of("prepare", shown(status)).endswith(text)
    assert f"\x1b[33m  {text}" in shown(status, color=True)
    assert reasons(status) == ["RecordsTruncated"]
    assert "raise prepare.contextLength" in shown(status)


def test_records_used_as_they_are_are_counted_without_yellow():
    status = finished(prepare={"unused": 50})
    text = "100 records → 42 rows, 50 left out by weights (50 %)"
    assert line_of("prepare", shown(status)).endswith(text)
    assert f"\x1b[32m  {text}" in shown(status, color=True)
    assert reasons(status) == []


def test_tokens_that_count_for_the_loss_are_in_the_line():
    status = finished(prepare={"trainTargets": 563, "trainTokens": 5794})
    text = "100 records → 42 rows, 563 of 5,794 tokens learned"
    assert line_of("prepare", shown(status)).endswith(text)


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        ({"invalid": 2}, ["RecordsInvalid"]),
        ({"dropped": 100}, ["RecordsDropped"]),
        ({"unrendered": 5}, ["RecordsUnrendered"]),
        ({"split": 50}, []),
        ({"records": 10_000, "truncated": 3}, []),
    ],
)
def test_lost_records_have_a_note_if_they_are_many(counts, reason):
    status = finished(prepare=counts)
    assert reasons(status) == reason
    (name,) = counts.keys() - {"records"}
    words = "not rendered in full" if name == "unrendered" else name
    assert f"{counts[name]} {words} (" in line_of("prepare", shown(status))


def test_base_score_stands_beside_the_score():
    status = finished(evaluate=exam(acc=PAIRED))
    text = "acc 0.172 → 0.477 (+0.305 ± 0.034)"
    assert line_of("evaluate", shown(status)).endswith(text)
    assert reasons(status) == []


def test_several_scores_have_a_line_each():
    scores = exam(acc=PAIRED, perplexity={"value": 12.5})
    lines = shown(finished(evaluate=scores)).splitlines()
    assert "      acc 0.172 → 0.477 (+0.305 ± 0.034)" in lines
    assert "      perplexity 12.5" in lines


def test_score_that_is_not_above_the_base_has_a_note():
    worse = {"value": 0.62, "base": 0.7}
    status = finished(evaluate=exam(acc=worse))
    assert reasons(status) == ["NoGain"]
    assert "acc 0.700 → 0.620 (-0.08)" in shown(status)
    # Whether a smaller perplexity is better, only the user knows.
    assert reasons(finished(evaluate=exam(perplexity=worse, acc=PAIRED))) == []


@pytest.mark.parametrize(
    ("loss", "reason"), [(2.4, []), (2.5, ["NoGain"]), (float("nan"), ["NoGain"])]
)
def test_held_out_loss_that_is_not_below_the_base_has_a_note(loss, reason):
    scores = {"value": loss, "base": 2.5}
    status = finished(evaluate=exam(validation_loss=scores, acc=PAIRED))
    assert reasons(status) == reason


def test_validation_loss_that_ended_above_its_first_has_a_note():
    validations = [(50, 0.5971), (100, 0.58), (942, 0.7012)]
    status = trained(losses=(0.69, 0.5, 0.4), validations=validations)
    assert reasons(status) == ["ValidationLossRose"]
    text = "validation loss rose from 0.5971 at step 50 to 0.7012 at step 942"
    assert f"      note: {text}" in shown(status)


def test_loss_of_dpo_above_ln_2_has_a_note():
    assert reasons(trained(accuracy=0.46, validationLoss=0.7)) == ["AboveReference"]
    assert reasons(trained(accuracy=0.9, validationLoss=0.5)) == []
    # The same loss is a good loss of SFT.
    assert reasons(trained(validationLoss=0.7)) == []


def test_training_loss_that_rose_has_a_note():
    status = trained(losses=(5.2, 5.5, 6.0, 6.5), validations=[(40, 6.389)])
    assert reasons(status) == ["TrainingLossRose"]
    assert "training loss rose from 5.2 to 6.5" in shown(status)
    noisy = (2.0, 1.9, 2.1, 2.05)
    assert reasons(trained(losses=noisy)) == []


def test_training_of_one_step_has_a_note():
    status = trained(losses=(2.0,), steps=1)
    assert reasons(status) == ["OneStep"]
    assert "train.microBatchSize" in shown(status)


def test_every_reason_is_in_the_troubleshooting_guide():
    guide = (ROOT / "docs/guides/troubleshooting.md").read_text()
    rows = re.findall(r"^[|] `(\w+)` [|]", guide, re.MULTILINE)
    assert set(NoteReason) <= set(rows)


def test_stage_that_has_not_succeeded_has_no_notes():
    scenario = Scenario().finish(prepare=CUT)
    scenario.edit(prepare={"contextLength": 256})
    assert reasons(scenario.reconcile_until_stable().status) == []


def test_list_names_notes_and_shows_the_base_score():
    status = finished(prepare=CUT, evaluate=exam(acc=PAIRED))
    pipeline = {
        "metadata": {"name": "demo"},
        "status": status.model_dump(mode="json", by_alias=True, exclude_none=True),
    }
    cells = row(pipeline, NOW)
    assert "acc 0.1719 → 0.4766" in cells
    assert cells[-1] == "RecordsTruncated"
    stage = {"name": "prepare", "attempts": [{"outcome": "OfAnotherVersion"}]}
    assert row({**pipeline, "status": {"stages": [stage]}}, NOW)[-1] == ""


def test_get_on_a_cluster_has_notes_as_text_and_json(cli, scenario):
    scenario.finish(prepare=CUT)
    assert (
        "note: 200 of 200 records are truncated (100 %)" in cli.run("get", "demo").out
    )
    status = json.loads(cli.run("get", "demo", "--json").out)["status"]
    assert [(note["stage"], note["reason"]) for note in status["notes"]] == [
        ("prepare", "RecordsTruncated")
    ]
    (item,) = json.loads(cli.run("get", "--json").out)["items"]
    assert item["status"]["notes"] == status["notes"]


def test_get_and_run_of_a_local_run_have_notes(cli, tmp_path):
    file = PipelineFile(tmp_path / ".finetune/local")
    pipeline = file.apply(Key("default", "local"), Scenario().spec, {})
    file.write_status(pipeline, finished(prepare=CUT))
    assert "note: 200 of 200 records are truncated" in cli.run("get", "local").out
    status = json.loads(cli.run("get", "local", "--json").out)["status"]
    assert [note["reason"] for note in status["notes"]] == ["RecordsTruncated"]
    (item,) = json.loads(cli.run("list", "--json").out)["items"]
    assert item["status"]["notes"] == status["notes"]
    assert "RecordsTruncated" in cli.run("list").out
