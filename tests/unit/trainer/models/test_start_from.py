"""Training that starts from an existing adapter: its weights, its settings, its digest, and what is refused."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.trainer.models import write_jsonl
from support.trainer.prepared import prepare, prepare_config
from support.trainer.stages import run_to_failure
from support.trainer.training import (
    documents,
    environment,
    pairs,
    run_train,
    stage_folder,
    train_config,
    write_rows,
)

from finetune_trainer.contract import AdapterSource, ExitCode
from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.models.start_adapter import open_start_adapter
from finetune_trainer.models.trained.merge import load_merged, with_adapter
from finetune_trainer.runtime.errors import ConfigInvalid, SourceNotFound
from finetune_trainer.training.distributed.sharding import copy_to_cpu
from finetune_trainer.training.methods.registry import load_trainable

torch.set_num_threads(1)
CPU = torch.device("cpu")
FIRST = "f" * 16
PAIRS = "s" * 16
LORA = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}
VARIANTS = {
    "LoRA": {},
    "RsLoRA": {},
    "DoRA": {},
    "whole-layer": {"modules_to_save": ["lm_head"]},
}


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory):
    """A workspace with an adapter of each kind."""
    workspace = tmp_path_factory.mktemp("trained")
    write_rows(workspace, documents(40), documents(8, seed=5))
    write_rows(workspace, pairs(20), pairs(20)[:10], prepared=PAIRS, pairs=True)
    for name, more in VARIANTS.items():
        variant = name if name in {"RsLoRA", "DoRA"} else "LoRA"
        lora = LORA | {"variant": variant} | more
        run_train(
            train_config(
                tiny_model, identity=name, lora=lora, max_steps=20, eval_steps=None
            ),
            workspace,
        )
    return workspace


def output(workspace, name="LoRA"):
    return stage_folder(workspace, name) / "output"


def from_adapter(model, folder, **changes):
    changes = {
        "max_steps": 6,
        "eval_steps": None,
        "lora": None,
        "identity": FIRST,
    } | changes
    return train_config(model, start_from={"uri": f"file://{folder}"}, **changes)


def started(model, folder, **changes):
    config = from_adapter(model, folder, **changes)
    start = open_start_adapter(config.recipe.start_from, environment(folder))
    return load_trainable(BaseModel("m", model, ""), config, CPU, start)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    "method", [{}, {"method": "QLoRA", "dtype": "BF16"}], ids=["LoRA", "QLoRA"]
)
def test_weights_and_settings_are_those_of_the_adapter(
    tiny_model, trained, name, method
):
    trainable = started(tiny_model, output(trained, name), **method)
    saved = load_file(output(trained, name) / "adapter_model.safetensors")
    assert trainable.weights.keys() == saved.keys()
    assert all(
        torch.equal(trainable.weights[key], tensor) for key, tensor in saved.items()
    )
    if (
        name == "whole-layer"
    ):  # PEFT adds the name of a tied layer once more, to the same effect
        return
    ours, theirs = (
        json.loads(text)
        for text in (
            trainable.format.others["adapter_config.json"],
            (output(trained, name) / "adapter_config.json").read_text(),
        )
    )
    assert ours == theirs


@pytest.mark.parametrize("name", VARIANTS)
def test_started_adapter_merges_as_the_first_one(tiny_model, trained, tmp_path, name):
    trainable = started(tiny_model, output(trained, name))
    trainable.format.write(
        copy_to_cpu(trainable.weights), tmp_path
    )  # tied layers share a tensor
    first, second = (
        load_merged(tiny_model, path, torch.float32)
        for path in (output(trained, name), tmp_path)
    )
    others = dict(second.named_parameters())
    assert all(
        torch.equal(parameter, others[key])
        for key, parameter in first.named_parameters()
    )


def test_training_goes_on_from_the_adapter(tiny_model, trained):
    before = load_merged(tiny_model, output(trained), torch.float32)
    result = run_train(from_adapter(tiny_model, output(trained), max_steps=1), trained)
    first = run_train(
        train_config(tiny_model, max_steps=1, identity="g" * 16, lora=LORA), trained
    )
    assert result.loss < first.loss - 0.01
    after = with_adapter(tiny_model, output(trained, FIRST), torch.float32)
    assert after.peft_config["default"].r == 4
    assert (
        load_merged(tiny_model, output(trained, FIRST), torch.float32).config
        == before.config
    )


def test_reference_of_dpo_is_the_starting_adapter(tiny_model, trained):
    config = from_adapter(
        tiny_model,
        output(trained),
        objective="DPO",
        max_steps=1,
        optimizer={"learning_rate": 1e-6},
    )
    result = run_train(
        config.model_copy(update={"prepare": PAIRS, "identity": "h" * 16}), trained
    )
    assert result.loss == pytest.approx(math.log(2), abs=1e-5)


def test_same_settings_in_the_recipe_are_accepted(tiny_model, trained):
    assert started(tiny_model, output(trained), lora=LORA | {"dropout": 0.1}).weights


@pytest.mark.parametrize(
    ("lora", "expected"),
    [
        (
            {"rank": 8},
            r"train\.lora\.rank is 8, but the adapter of train\.startFrom .* has 4",
        ),
        ({"alpha": 16}, r"train\.lora\.alpha is 16.0, but .* has 8"),
        ({"variant": "DoRA"}, r"train\.lora\.variant is DoRA, but .* has LoRA"),
        (
            {"target_modules": ["q_proj", "k_proj", "v_proj"]},
            "does not adapt k_proj, as train.lora does; its layers are",
        ),
        ({"target_modules": ["q_proj"]}, "adapts v_proj, which train.lora does not"),
        ({"modules_to_save": ["lm_head"]}, "does not adapt .*, as train.lora does"),
    ],
)
def test_other_settings_in_the_recipe_are_refused(tiny_model, trained, lora, expected):
    with pytest.raises(ConfigInvalid, match=expected):
        started(tiny_model, output(trained), lora=LORA | lora)


@pytest.fixture
def adapter(trained, tmp_path):
    return shutil.copytree(output(trained), tmp_path / "adapter")


def edit(adapter, **changes):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"peft_type": "IA3"},
            "is an adapter of kind IA3: only LORA can be trained further",
        ),
        (
            {"rank_pattern": {"q_proj": 2}},
            "has rank_pattern, which train.lora cannot express",
        ),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "has init_lora_weights pissa_niter_4, which train.lora",
        ),
        ({"bias": "all"}, "has bias all, which"),
        ({"target_modules": ".*q_proj"}, "has target_modules that are a pattern"),
        ({"r": 2}, "is .* and must be .*, with finite values"),
    ],
)
def test_adapter_that_cannot_be_trained_is_refused(
    tiny_model, adapter, changes, expected
):
    edit(adapter, **changes)
    with pytest.raises(ConfigInvalid, match=expected):
        started(tiny_model, adapter)


def test_broken_weights_are_refused(tiny_model, adapter):
    weights = load_file(adapter / "adapter_model.safetensors")
    next(iter(weights.values()))[0] = float("nan")
    save_file(weights, adapter / "adapter_model.safetensors")
    with pytest.raises(ConfigInvalid, match="with finite values"):
        started(tiny_model, adapter)
    (adapter / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        started(tiny_model, adapter)


def test_pickled_weights_are_not_read(tiny_model, adapter):
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(SourceNotFound, match=r"it has no adapter_model\.safetensors"):
        started(tiny_model, adapter)


def test_another_base_model_is_logged(tiny_model, adapter, capsys):
    edit(adapter, base_model_name_or_path="org/other")
    started(tiny_model, adapter)
    assert (
        "names the base model org/other, this pipeline has file://"
        in capsys.readouterr().out
    )


def test_adapter_of_another_base_model_is_refused(tiny_model, adapter, tmp_path):
    other = shutil.copytree(tiny_model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    write_jsonl(tmp_path / "data.jsonl", [{"text": "the file"}] * 20)
    source = AdapterSource(uri=f"file://{adapter}")
    config = prepare_config(other, validation_fraction=0.2).model_copy(
        update={"start_from": source}
    )
    message, code = run_to_failure(config, environment(tmp_path))
    assert "was trained on a base model with the digest sha256:" in message
    assert code == ExitCode.CONFIG
    (adapter / "manifest.json").write_text('{"about": []}')  # of another program
    assert prepare(config, environment(tmp_path)).start_digest


def test_full_training_has_no_adapter_to_start_from(tiny_model, adapter):
    with pytest.raises(ConfigInvalid, match="Full trains no adapter"):
        started(tiny_model, adapter, method="Full")


def test_prepare_finds_the_digest_that_train_requires(
    tiny_model, trained, adapter, tmp_path
):
    write_jsonl(tmp_path / "data.jsonl", [{"text": "the file"}] * 20)
    source = AdapterSource(uri=f"file://{adapter}")
    config = prepare_config(tiny_model, validation_fraction=0.2).model_copy(
        update={"start_from": source}
    )
    result = prepare(config, environment(tmp_path))
    start = open_start_adapter(source, environment(tmp_path))
    assert start
    assert result.start_digest == start.digest
    training = from_adapter(tiny_model, adapter).model_copy(
        update={"prepare": result.identity, "start_digest": result.start_digest}
    )
    run_train(training, tmp_path)
    edit(adapter, lora_dropout=0.3)
    with pytest.raises(
        ConfigInvalid,
        match=r"has the digest sha256:.*, but prepare/b+ has found sha256:",
    ):
        run_train(training.model_copy(update={"identity": "i" * 16}), tmp_path)
