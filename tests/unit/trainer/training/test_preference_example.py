"""The settings of examples/preference learn: the validation loss of DPO falls below ln 2 by a tenth."""

import json
import math
import random
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.trainer.models import prompt_records
from support.trainer.prepared import prepare, prepare_config
from support.trainer.training import run_train, train_config

from finetune_cli.forecast.learning_rate import start_rate
from finetune_trainer.contract import TrainRecipe

EXAMPLE = Path(__file__).parents[4] / "examples" / "preference"
SPEC = yaml.safe_load((EXAMPLE / "pipeline.yaml").read_text())["spec"]
OF_THE_POD = ("checkpoint", "placement", "pod", "epochs")
STEPS = 240
"""Half of the example's."""


@pytest.fixture
def prepared(tiny_model, tmp_path, environment, manifest_dir):
    """The pairs of the example's program, of records whose completion is one of four words."""
    pair_of = runpy.run_path(str(EXAMPLE / "pairs.py"))["pair_of"]
    records = prompt_records(200)
    words = sorted({record["completion"] for record in records})
    generator = random.Random(7)
    pairs = [pair_of(record, words, generator) for record in records]
    (manifest_dir / "data.jsonl").write_text(
        "".join(json.dumps(pair) + "\n" for pair in pairs)
    )
    config = prepare_config(
        tiny_model,
        objective="DPO",
        context_length=SPEC["prepare"]["contextLength"],
        validation=SPEC["validation"],
    )
    prepare(config, environment)
    return config.identity


def recipe() -> dict[str, Any]:
    train = {
        key: value for key, value in SPEC["train"].items() if key not in OF_THE_POD
    }
    return {**train, "maxSteps": STEPS, "evalSteps": 60}


def test_example_learns_the_preference(prepared, tiny_model, environment):
    config = train_config(tiny_model).model_copy(
        update={
            "prepare": prepared,
            "recipe": TrainRecipe.model_validate(recipe()),
        }
    )
    result = run_train(config, environment.workspace)
    assert result.validation_loss is not None
    assert result.validation_loss < 0.9 * math.log(2)


def test_comment_names_the_rate_for_a_large_model():
    """The example's rate is for a tiny model."""
    lines = (EXAMPLE / "pipeline.yaml").read_text().splitlines()
    [line] = [line for line in lines if "learningRate:" in line]
    assert f"start with {start_rate('DPO'):.1e}".replace("e-0", "e-") in line
