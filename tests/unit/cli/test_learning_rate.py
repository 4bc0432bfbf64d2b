"""A learning rate fits the objective: `init` writes such a rate, `validate --check` and `plan` note another."""

import json

import pytest
from support.cli.training_spec import spec_of

from finetune_cli.__main__ import main
from finetune_cli.forecast.learning_rate import learning_rate_line
from finetune_cli.manifest.manifest import read

PAIR = {"prompt": "Name a colour.", "chosen": "Red.", "rejected": "Three."}
PAIR_OF_CHATS = {
    "chosen": [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Good day"},
    ],
    "rejected": [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Go away"},
    ],
}
COMPLETION = {"prompt": "Name a colour.", "completion": "Red."}


def rate(value):
    return {"optimizer": {"learningRate": value}}


@pytest.mark.parametrize(
    ("record", "expected"), [(PAIR, 5e-6), (PAIR_OF_CHATS, 5e-6), (COMPLETION, 2e-4)]
)
def test_init_writes_a_learning_rate_for_the_data(
    tmp_path, monkeypatch, record, expected
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n")
    assert main(["init", "--data", "data.jsonl"]) == 0
    spec = read(tmp_path / "pipeline.yaml").spec
    assert spec.train.optimizer.learning_rate == expected
    assert learning_rate_line(spec) is None


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"objective": "DPO"}, "0.0002 is far above the usual rates of DPO for an adapter"),
        ({"objective": "DPO", **rate(1e-9)}, "1e-09 is far below the usual rates of DPO for an adapter"),
        ({"objective": "DPO", "method": "Full", **rate(1e-4)}, "above the usual rates of DPO for all weights"),
        ({"method": "Full", **rate(1e-3)}, "above the usual rates of SFT for all weights"),
        (rate(0.1), "0.1 is far above the usual rates of SFT for an adapter"),
        (rate(1e-6), "1e-06 is far below the usual rates of SFT for an adapter"),
    ],
)  # fmt: skip
def test_learning_rate_far_from_the_usual_ones_is_noted(tmp_path, train, words):
    line = learning_rate_line(spec_of(tmp_path, **train))
    assert line
    assert words in line
    assert "set train.optimizer.learningRate to about" in line


@pytest.mark.parametrize(
    "train",
    [
        {},
        {"method": "QLoRA", **rate(1e-3)},
        {"method": "Full", **rate(2e-5)},
        {"objective": "DPO", **rate(5e-6)},
        {"objective": "DPO", **rate(5e-5)},
        {"objective": "DPO", "pod": {"image": "a/b", "command": ["train"]}},
    ],
)
def test_usual_learning_rate_is_not_noted(tmp_path, train):
    assert learning_rate_line(spec_of(tmp_path, **train)) is None


def test_check_notes_a_learning_rate_of_another_objective(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    spec_of(tmp_path, objective="DPO")
    main(["validate", "--check", "p.yaml"])
    output = capsys.readouterr().out
    assert "p.yaml: train: learning rate 0.0002 is far above" in output
