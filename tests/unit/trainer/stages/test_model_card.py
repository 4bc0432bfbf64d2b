"""The model card's loss, and its code: it loads the published model."""

import ast
import contextlib
import io
import json
import re
from pathlib import Path

import pytest
from support.trainer.pushes import TARGET, push, push_config, push_environment

from finetune_trainer.contract import LossCurve, PrepareResult, PushTarget
from finetune_trainer.contract.metric_rows import Row
from finetune_trainer.contract.usage import load_code
from finetune_trainer.publishing.loss_chart import loss_chart, loss_section
from finetune_trainer.runtime.stage_folder import write_result


def published(folder: Path, base: Path, target: PushTarget, *, conversations: bool):
    """Publish a trained adapter to a target; return the folder with the model card."""
    environment = push_environment(folder, base)
    prepared = PrepareResult(
        identity="d1", digest="sha256:0", records=1, invalid=0, truncated=0, dropped=0, train_rows=1,
        validation_rows=0, train_tokens=9, data_digest="sha256:0", conversations=conversations,
    )  # fmt: skip
    write_result(environment.stage_dir("prepare", "d1"), prepared)
    rows = [{"step": step, "time": 1.0, "loss": 8.0 / step} for step in range(1, 5)]
    rows[3]["validation_loss"] = 2.5
    metrics = environment.stage_dir("train", "first") / "metrics.jsonl"
    metrics.write_text("\n".join(json.dumps(row) for row in rows))
    config = push_config(base)
    recipe = config.recipe.model_copy(update={"targets": (target,)})
    push(config.model_copy(update={"recipe": recipe}), environment)
    return folder / "claims" / "models" / "names" / "latest"


def run_code(folder: Path, monkeypatch, **names: str) -> str:
    """Run the code of a model card in its folder, with other names; return what it prints."""
    card = (folder / "README.md").read_text()
    [code] = re.findall(r"```python\n(.*?)\n```", card, re.DOTALL)
    for old, new in names.items():
        code = re.sub(rf"^{old} = .*$", f"{old} = {new!r}", code, flags=re.MULTILINE)
    monkeypatch.chdir(folder)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    return printed.getvalue()


@pytest.mark.parametrize("conversations", [False, True])
def test_code_of_the_card_answers_with_the_published_model(
    tmp_path, tiny_model, monkeypatch, conversations
):
    folder = published(tmp_path, tiny_model, TARGET, conversations=conversations)
    assert run_code(folder, monkeypatch).strip()
    card = (folder / "README.md").read_text()
    assert ("apply_chat_template" in card) == conversations
    assert "vllm serve ." in card


def test_code_of_an_adapters_card_attaches_it_to_the_base(
    tmp_path, tiny_model, monkeypatch
):
    target = PushTarget(uri=TARGET.uri, format="Adapter")
    folder = published(tmp_path, tiny_model, target, conversations=False)
    card = (folder / "README.md").read_text()
    assert f"base = 'file://{tiny_model}'" in card
    assert run_code(folder, monkeypatch, base=str(tiny_model)).strip()


def test_card_has_the_loss_of_the_training(tmp_path, tiny_model):
    folder = published(tmp_path, tiny_model, TARGET, conversations=False)
    card = (folder / "README.md").read_text()
    assert "## Loss\n\n```text\n       8 █\n" in card
    assert "Training loss of each step, on a logarithmic scale." in card
    assert "The lowest validation loss is 2.5 at step 4." in card


def test_chart_goes_from_the_highest_to_the_lowest_loss():
    curve = LossCurve(every_steps=10, step=35, losses=(8.0, 4.0, 2.0, 1.0))
    lines = loss_chart(curve).split("\n")
    assert lines[0] == "       8 █"
    assert lines[7] == "       1 ███▁"
    assert lines[8].strip() == "step 35"


@pytest.mark.parametrize("losses", [(2.0, 2.0), (0.0, -1.0, 3.0), (1e15, 1e-9)])
def test_chart_of_any_losses_has_its_lines(losses):
    curve = LossCurve(every_steps=1, step=len(losses), losses=losses)
    assert len(loss_chart(curve).split("\n")) == 9


def test_lost_metrics_leave_no_section():
    assert loss_section([]) == ""
    # The rows of the first steps are lost.
    assert loss_section([Row(9, 1.0, {"loss": 2.0})]) == ""


def test_places_of_the_code_are_texts_of_python():
    hostile = "a'; import os; '"
    code = load_code(hostile, hostile, conversations=False)
    ast.parse(code)
    assert f"place = {hostile!r}" in code
