"""The manifest that init writes suits the base model and the records: `validate --check` accepts it as it is."""

import json
import shutil

import pytest
from support.trainer.families import FAMILIES, make_family_model

from finetune_cli.__main__ import main
from finetune_cli.manifest.manifest import read

pytestmark = pytest.mark.usefixtures("trainer_here")

QUESTION = {"role": "user", "content": "What is blue?"}
ANSWER = {"role": "assistant", "content": "The sky is blue."}
OTHER = {"role": "assistant", "content": "I do not know."}
SFT_FORMS = {
    "text": {"text": "The sky is blue."},
    "prompt": {"prompt": "What is blue?", "completion": " The sky."},
    "messages": {"messages": [QUESTION, ANSWER]},
    "alpaca": {"instruction": "What is blue?", "input": "", "output": "The sky."},
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": "What is blue?"},
            {"from": "gpt", "value": "The sky."},
        ]
    },
    "question": {"question": "What is blue?", "answer": "The sky."},
    "trl": {"prompt": [QUESTION], "completion": [ANSWER]},
}
DPO_FORMS = {
    "pairs": {"prompt": "What is blue?", "chosen": "The sky.", "rejected": "Nothing."},
    "pairs-of-messages": {
        "chosen": [QUESTION, ANSWER],
        "rejected": [QUESTION, OTHER],
    },
    "openai-pairs": {
        "input": {"messages": [QUESTION]},
        "preferred_output": [ANSWER],
        "non_preferred_output": [OTHER],
    },
}
FORMS = SFT_FORMS | DPO_FORMS
BASES = {"llama-tied": True, "granite-hybrid": False}
"""Family -> whether its rows hold several documents."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The base models, by their families."""
    folder = tmp_path_factory.mktemp("bases")
    return {name: make_family_model(FAMILIES[name], folder / name) for name in BASES}


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("base", BASES)
def test_manifest_of_init_passes_the_check(folders, tmp_path, capsys, form, base):
    record = json.dumps(FORMS[form])
    (tmp_path / "data.jsonl").write_text(f"{record}\n" * 40)
    options = ["--model", str(folders[base]), "--data", "data.jsonl"]
    assert main(["init", *options]) == 0
    spec = read(tmp_path / "pipeline.yaml").spec
    # A row of pairs has a single completion anyway.
    assert spec.prepare.packing is (BASES[base] or form in DPO_FORMS)
    assert spec.train.objective == ("DPO" if form in DPO_FORMS else "SFT")
    assert main(["validate", "--check", "pipeline.yaml"]) == 0, capsys.readouterr().out


def quantized(model):
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (model / "config.json").write_text(json.dumps(config))


def pickled(model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def vision_language(model):
    (model / "config.json").write_text('{"model_type": "mistral3"}')


def adapter_only(model):
    (model / "config.json").rename(model / "adapter_config.json")


def damaged(model):
    (model / "config.json").write_text('{"model_type":')


def missing(model):
    shutil.rmtree(model)


REFUSED = [
    (quantized, "already quantized (awq): use a base model that is not quantized"),
    (pickled, "pickled weights only (pytorch_model.bin)"),
    (vision_language, "a vision-language model (mistral3), which cannot be trained"),
    (adapter_only, "name its base model here, and the adapter in train.startFrom"),
    (damaged, "config.json is not JSON"),
    (missing, "does not exist"),
]


@pytest.mark.parametrize(("damage", "problem"), REFUSED)
def test_base_that_cannot_be_trained_is_refused(
    tiny_model, tmp_path, capsys, damage, problem
):
    damage(shutil.copytree(tiny_model, tmp_path / "base"))
    assert main(["init", "--model", "base"]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1
    assert not (tmp_path / "pipeline.yaml").exists()
