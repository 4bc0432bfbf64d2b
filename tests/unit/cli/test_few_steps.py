"""A training of too few steps is noted before it starts."""

import pytest
from support.cli.training_spec import spec_of

from finetune_cli.forecast.few_steps import few_steps_line
from finetune_cli.manifest.manifest import read_text

BATCH = {"microBatchSize": 4, "gradientAccumulationSteps": 8}


@pytest.mark.parametrize(
    ("train", "rows", "line"),
    [
        ({"epochs": 3, **BATCH}, 4, "1 step in all: a step takes 32 rows, and the data has 4;"),
        ({"epochs": 20, **BATCH}, 4, "3 steps in all: a step takes 32 rows, and the data has 4;"),
        ({"maxSteps": 5, **BATCH}, 4, "5 steps in all: a step takes 32 rows, and the data has 4;"),
        ({"epochs": 1, **BATCH}, 32, "1 step in all: a step takes 32 rows, and the data has 32;"),
        ({"epochs": 1, "objective": "DPO", **BATCH}, 8, "1 step in all: a step takes 32 pairs, and the data has 4;"),
        ({"epochs": 1, "processesPerNode": 2, **BATCH}, 60, "a step takes 64 rows, and the data has 60;"),
    ],
)  # fmt: skip
def test_batch_larger_than_the_data_is_noted(tmp_path, train, rows, line):
    warning = few_steps_line(spec_of(tmp_path, **train), rows)
    assert warning
    assert line in warning
    assert warning.endswith("lower microBatchSize and gradientAccumulationSteps")


def test_single_row_has_another_fix_than_a_smaller_batch(tmp_path):
    warning = few_steps_line(spec_of(tmp_path), 1)
    assert warning
    assert warning.startswith("train: 1 step in all: the data has 1 row; add records")


@pytest.mark.parametrize(
    ("train", "rows"),
    [({"epochs": 3, **BATCH}, 100), ({"maxSteps": 1, **BATCH}, 100), ({}, 2)],
)
def test_training_of_several_steps_has_no_note(tmp_path, train, rows):
    assert few_steps_line(spec_of(tmp_path, **train), rows) is None


@pytest.mark.parametrize(
    ("train", "field"),
    [
        ("{evalSteps: 10}", "spec.train.evalSteps"),
        ("{evalSteps: 10, earlyStopping: {}}", "spec.train.earlyStopping"),
    ],
)
@pytest.mark.parametrize("fraction", [0, 0.05])
def test_validation_without_records_is_an_error(tmp_path, train, field, fraction):
    text = f"""
apiVersion: finetune.dev/v1alpha1
kind: FineTunePipeline
metadata: {{name: demo}}
spec:
  model: {{uri: base}}
  datasets: [{{uri: data.jsonl}}]
  validation: {{fraction: {fraction}}}
  train: {train}
"""
    diagnostics = read_text(tmp_path / "p.yaml", text).diagnostics
    if fraction:
        assert diagnostics == []
        return
    messages = {diagnostic.path: diagnostic.message for diagnostic in diagnostics}
    assert {diagnostic.line for diagnostic in diagnostics} == {9}
    assert "set validation.fraction above 0" in messages[field]
