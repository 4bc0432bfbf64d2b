"""The demo's material: data set, evaluation task and base model."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from finetune_cli.manifest.manifest import read

DEMO = Path(__file__).parents[2] / "examples" / "demo"
sys.path.insert(0, str(DEMO))

import base_model  # noqa: E402
import docstrings  # noqa: E402
import material  # noqa: E402

SEED = 5


@pytest.fixture(scope="module")
def owners():
    return docstrings.gather()


@pytest.fixture(scope="module")
def rows(owners):
    return docstrings.split(owners, SEED)


@pytest.fixture
def few(rows, monkeypatch):
    """Make material.make fast: it uses only these rows, without reading the library, and short pre-training rows."""
    train, test, pretraining = rows
    few = (train[:64], test[:16], pretraining[:300])
    monkeypatch.setattr(docstrings, "split", lambda _owners, _seed: few)
    monkeypatch.setattr(docstrings, "gather", dict)
    monkeypatch.setattr(base_model, "ROW", 32)
    return few


def test_test_texts_are_not_in_the_training_data(rows):
    train, test, pretraining = rows
    held_out = {row["text"] for row in test}
    assert held_out.isdisjoint(row["text"] for row in train)
    assert held_out.isdisjoint(pretraining)


def test_chance_level_is_one_in_eight(rows):
    _, test, _ = rows
    counts = {
        module: sum(row["module"] == module for row in test)
        for module in docstrings.MODULES
    }
    assert set(counts.values()) == {docstrings.HELD_OUT}
    assert len(docstrings.MODULES) == 8


def test_every_text_has_exactly_one_answer(rows):
    train, test, _ = rows
    texts = [row["text"] for row in train + test]
    assert len(texts) == len(set(texts))


def test_held_out_rows_depend_on_the_seed(owners, rows):
    assert docstrings.split(owners, SEED)[1] == rows[1]
    assert docstrings.split(owners, SEED + 1)[1] != rows[1]


def test_gather_does_not_execute_the_library(tmp_path):
    text = "Says something that is long enough to be kept as a row."
    (tmp_path / "mine.py").write_text(
        f'"""{text}"""\nopen({str(tmp_path / "ran")!r}, "w")\n'
    )
    (tmp_path / "broken.py").write_text("def (\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "other.py").write_text(f'"""Not this: {text}"""\n')
    assert docstrings.gather(tmp_path) == {text: {"mine"}}
    assert not (tmp_path / "ran").exists()


def test_text_in_two_modules_belongs_to_both(tmp_path):
    text = "Says something that is long enough to be kept as a row."
    for name in ("one.py", "_pytwo.py"):
        (tmp_path / name).write_text(f'"""{text}"""\n')
    assert docstrings.gather(tmp_path) == {text: {"one", "two"}}


def test_base_model_loads_and_every_record_fits_into_a_row(rows, few, tmp_path):
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    material.make(tmp_path, steps=2, seed=SEED)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base-model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base-model")
    records = [
        json.loads(line)
        for line in (tmp_path / "data" / "train.jsonl").read_text().splitlines()
    ]
    ids = tokenizer(
        records[0]["prompt"] + records[0]["completion"], return_tensors="pt"
    )["input_ids"]
    assert torch.isfinite(model(input_ids=ids).logits).all()

    full_tokenizer = base_model.train_tokenizer(rows[2])
    longest = max(
        len(full_tokenizer.encode(f"{row['text']}\nModule: {row['module']}"))
        for row in rows[0]
    )
    assert longest + 2 <= read(DEMO / "pipeline.yaml").spec.prepare.context_length


def test_intact_material_is_kept_and_corrupt_is_made_again(few, tmp_path):
    def inodes():
        return {
            path.name: path.stat().st_ino
            for path in (tmp_path / "data", tmp_path / "base-model")
        }

    material.make(tmp_path, steps=1, seed=SEED)
    first = inodes()
    (tmp_path / "published").mkdir()
    material.make(tmp_path, steps=1, seed=SEED)
    assert inodes() == first

    weights = tmp_path / "base-model" / "model.safetensors"
    intact = weights.read_bytes()
    weights.write_bytes(intact[:-1] + b"?")
    material.make(tmp_path, steps=1, seed=SEED)
    assert weights.read_bytes() == intact
    assert inodes()["data"] == first["data"]


def test_base_model_depends_on_seed_and_steps(few, tmp_path):
    weights = tmp_path / "base-model" / "model.safetensors"
    contents = set()
    for steps, seed in ((1, 1), (2, 1), (1, 2)):
        material.make(tmp_path, steps=steps, seed=seed)
        contents.add(weights.read_bytes())
    assert len(contents) == 3


def test_task_prompt_equals_the_training_prompt(few, tmp_path):
    material.make(tmp_path, steps=1, seed=SEED)
    task = yaml.safe_load((tmp_path / "data" / "task.yaml").read_text())
    record = json.loads((tmp_path / "data" / "train.jsonl").read_text().splitlines()[0])
    row = few[0][0]
    assert record["prompt"] == task["doc_to_text"].replace("{{text}}", row["text"])
    assert record["completion"] == " " + row["module"]
    assert task["doc_to_choice"] == list(docstrings.MODULES)
    assert (tmp_path / "data" / task["dataset_kwargs"]["data_files"]["test"]).is_file()


def test_manifest_uses_a_single_volume():
    spec = read(DEMO / "pipeline.yaml").spec
    assert spec.push
    assert spec.evaluate
    targets = spec.push.targets
    tasks = spec.evaluate.tasks
    uris = [
        spec.model.uri,
        *(dataset.uri for dataset in spec.datasets),
        *(target.uri for target in targets),
        *(task.file for task in tasks),
    ]
    assert all(str(uri).startswith("pvc://demo/") for uri in uris)
    [gate] = spec.evaluate.gates
    assert gate.value > 1 / len(docstrings.MODULES)
