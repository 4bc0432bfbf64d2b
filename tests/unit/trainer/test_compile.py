"""Compiled layers: the same training, and no compilation that depends on the documents of a batch."""

import pytest
import torch
from support.models import make_tiny_model
from support.training import documents, run_train, train_config, write_rows
from torch._dynamo.utils import counters

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    """The eager backend traces the layers without the C++ compiler, which would run for half a minute."""
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda each, **how: compile_module(each, backend="eager", **how))
    torch.compiler.reset()
    counters.clear()


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "unpacked"])
def test_all_layers_are_compiled_three_times_at_most(tmp_path, packing):
    """Once for the probe of the model, once for training and once for validation."""
    model = make_tiny_model(tmp_path / "model", layers=4)
    rows, validation_rows = documents(60, longest=28), documents(8, seed=5, longest=28)
    write_rows(tmp_path, rows, validation_rows, packing=packing)
    recipe = {"max_steps": 12, "eval_steps": 6, "lora": {"rank": 4, "dropout": 0.0}}
    plain = run_train(train_config(model, **recipe), tmp_path)
    assert not counters["stats"]
    compiled = run_train(train_config(model, **recipe, compile=True, identity="b" * 16), tmp_path)
    assert 2 <= counters["stats"]["unique_graphs"] <= 3
    assert not counters["graph_break"]
    assert compiled.loss == pytest.approx(plain.loss, abs=1e-4)
    assert compiled.validation_loss == pytest.approx(plain.validation_loss, abs=1e-4)
