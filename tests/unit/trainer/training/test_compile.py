"""Compiled layers: the same training, and no compilation that depends on the documents of a batch."""

import os
from typing import Any

import pytest
import torch
from support.trainer.document_kernel import attend_in_one_operation
from support.trainer.models import make_tiny_model
from support.trainer.training import (
    ALL,
    document,
    documents,
    run_train,
    stage_folder,
    train_config,
    write_rows,
)
from torch._dynamo.utils import counters

from finetune_trainer.contract import Samples
from finetune_trainer.contract.sample_rows import SAMPLES
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.training.model import document_attention

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    """The eager backend traces the layers without the C++ compiler, which would run for half a minute."""
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda module, **how: compile_module(module, backend="eager", **how),
    )
    torch.compiler.reset()
    counters.clear()


def assert_compiling_changes_no_loss(model, workspace, recipe):
    """Train without and with the compiler, which works three times at most and breaks no graph."""
    plain = run_train(train_config(model, **recipe), workspace)
    assert not counters["stats"]
    compiled = run_train(
        train_config(model, **recipe, compile=True, identity="b" * 16), workspace
    )
    assert 2 <= counters["stats"]["unique_graphs"] <= 3
    assert not counters["graph_break"]
    rounding = (
        1e-3 if recipe.get("dtype") == "BF16" else 1e-4
    )  # of 5.8, and bf16 has a precision of 4e-3
    assert compiled.loss == pytest.approx(plain.loss, abs=rounding)
    assert compiled.validation_loss == pytest.approx(
        plain.validation_loss, abs=rounding
    )


VARIATIONS: dict[str, tuple[bool, dict[str, Any]]] = {
    "packed": (True, {}),
    "unpacked": (False, {}),
    "Full": (True, {"method": "Full", "lora": None}),
}
if ALL:
    VARIATIONS |= {
        "BF16": (True, {"dtype": "BF16"}),
        "QLoRA": (True, {"method": "QLoRA"}),
        "RsLoRA": (True, {"lora": {"rank": 4, "variant": "RsLoRA"}}),
    }


@pytest.mark.parametrize(("packing", "more"), VARIATIONS.values(), ids=VARIATIONS)
def test_all_layers_are_compiled_three_times_at_most(tmp_path, packing, more):
    """Once for the first layer, whose input needs no gradient, once for the others, and once for validation.

    In BF16 a compiled layer rounds elsewhere.
    """
    model = make_tiny_model(tmp_path / "model", layers=4)
    rows = documents(60, longest=28)
    validation_rows = documents(8, seed=5, longest=28)
    write_rows(tmp_path, rows, validation_rows, packing=packing)
    recipe = {
        "max_steps": 12,
        "eval_steps": 6,
        "lora": {"rank": 4, "dropout": 0.0},
        **more,
    }
    assert_compiling_changes_no_loss(model, tmp_path, recipe)


def test_last_batch_of_one_row_compiles_no_layer_again(tmp_path):
    """The last step and the validation end with one. The compiler takes a size of 1 for a constant."""
    model = make_tiny_model(tmp_path / "model", layers=4)
    write_rows(
        tmp_path,
        documents(61, longest=28),
        documents(9, seed=5, longest=28),
        packing=False,
    )
    recipe = {
        "epochs": 1,
        "max_steps": None,
        "eval_steps": 3,
        "lora": {"rank": 4, "dropout": 0.0},
    }
    assert_compiling_changes_no_loss(model, tmp_path, recipe | {"micro_batch_size": 4})


@pytest.mark.skipif(
    os.environ.get("TRAINING") != "all",
    reason="TRAINING=all runs it: the C++ compiler's half minute",
)
def test_compiled_kernels_change_no_loss(tmp_path, monkeypatch):
    monkeypatch.undo()  # the default backend, as users have it
    model = make_tiny_model(tmp_path / "model", layers=4)
    write_rows(tmp_path, documents(60, longest=28), documents(8, seed=5, longest=28))
    recipe = {
        "max_steps": 12,
        "eval_steps": 6,
        "lora": {"rank": 4, "dropout": 0.0},
    }
    assert_compiling_changes_no_loss(model, tmp_path, recipe)


def test_flat_batches_compile_no_layer_again(tmp_path, monkeypatch):
    """As on a GPU: a batch has any number of tokens and documents, and a document may fill it."""
    monkeypatch.setattr(document_attention, "varlen_attn", attend_in_one_operation)
    monkeypatch.setattr(document_attention, "runs_on", lambda _device, _dtype: True)
    model = make_tiny_model(tmp_path / "model", layers=4)
    filling = [document(start, 32) for start in range(0, 40, 4)]
    write_rows(
        tmp_path,
        [*documents(40, longest=28), *filling],
        documents(8, seed=5, longest=28),
    )
    recipe = {
        "max_steps": 12,
        "eval_steps": 6,
        "micro_batch_size": 1,
        "lora": {"rank": 4, "dropout": 0.0},
    }
    assert_compiling_changes_no_loss(model, tmp_path, recipe)


def test_compiled_dora_is_refused(tmp_path):
    """Its layers would be compiled in pieces, again and again, up to a limit that ends compiling."""
    model = make_tiny_model(tmp_path / "model", layers=2)
    write_rows(tmp_path, documents(8, longest=28), [])
    config = train_config(
        model, max_steps=1, lora={"rank": 4, "variant": "DoRA"}, compile=True
    )
    with pytest.raises(ConfigInvalid, match=r"train\.compile: DoRA cannot be compiled"):
        run_train(config, tmp_path)


def test_samples_compile_nothing(tmp_path):
    """Generation has a cache, for which each layer would be compiled on its own, up to a limit that ends compiling."""
    model = make_tiny_model(tmp_path / "model", layers=4)
    write_rows(tmp_path, documents(60, longest=28), documents(8, seed=5, longest=28))
    recipe = {
        "max_steps": 4,
        "eval_steps": 2,
        "lora": {"rank": 4, "dropout": 0.0},
        "compile": True,
    }
    run_train(train_config(model, **recipe), tmp_path)
    graphs = counters["stats"]["unique_graphs"]
    torch.compiler.reset()
    counters.clear()
    samples = Samples(prompts=("w1 w2",), max_new_tokens=4)
    config = train_config(model, **recipe, identity="b" * 16).model_copy(
        update={"samples": samples}
    )
    run_train(config, tmp_path)
    assert counters["stats"]["unique_graphs"] == graphs
    assert (stage_folder(tmp_path, "b" * 16) / SAMPLES).read_text().count("\n") == 3
