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
    """The material is made from these rows without reading the whole library again, and its base model is quick."""
    train, exam, plain = rows
    few = (train[:64], exam[:16], plain[:300])
    monkeypatch.setattr(docstrings, "split", lambda _owners, _seed: few)
    monkeypatch.setattr(docstrings, "gather", dict)
    monkeypatch.setattr(base_model, "ROW", 32)
    return few


def test_no_text_of_the_exam_is_ever_trained_on(rows):
    train, exam, plain = rows
    unseen = {row["text"] for row in exam}
    assert unseen.isdisjoint(row["text"] for row in train)
    assert unseen.isdisjoint(plain)


def test_guessing_scores_one_in_eight(rows):
    _, exam, _ = rows
    counts = {module: sum(row["module"] == module for row in exam) for module in docstrings.MODULES}
    assert set(counts.values()) == {docstrings.HELD_OUT}
    assert len(docstrings.MODULES) == 8


def test_a_text_has_one_answer_only(rows):
    train, exam, _ = rows
    texts = [row["text"] for row in train + exam]
    assert len(texts) == len(set(texts))


def test_the_seed_decides_which_rows_are_held_out(owners, rows):
    assert docstrings.split(owners, SEED)[1] == rows[1]
    assert docstrings.split(owners, SEED + 1)[1] != rows[1]


def test_reading_the_library_runs_nothing_of_it(tmp_path):
    said = "Says something that is long enough to be kept as a row."
    (tmp_path / "mine.py").write_text(f'"""{said}"""\nopen({str(tmp_path / "ran")!r}, "w")\n')
    (tmp_path / "broken.py").write_text("def (\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "other.py").write_text(f'"""Not this: {said}"""\n')
    assert docstrings.gather(tmp_path) == {said: {"mine"}}
    assert not (tmp_path / "ran").exists()


def test_a_text_of_two_modules_belongs_to_both(tmp_path):
    said = "Says something that is long enough to be kept as a row."
    for name in ("one.py", "_pytwo.py"):
        (tmp_path / name).write_text(f'"""{said}"""\n')
    assert docstrings.gather(tmp_path) == {said: {"one", "two"}}


def test_the_base_model_loads_and_every_record_fits_into_a_row(rows, few, tmp_path):
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    material.make(tmp_path, steps=2, seed=SEED)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base-model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base-model")
    records = [json.loads(line) for line in (tmp_path / "data" / "train.jsonl").read_text().splitlines()]
    ids = tokenizer(records[0]["prompt"] + records[0]["completion"], return_tensors="pt")["input_ids"]
    assert torch.isfinite(model(input_ids=ids).logits).all()

    whole = base_model.tokenizer_for(rows[2])
    longest = max(len(whole.encode(f"{row['text']}\nModule: {row['module']}")) for row in rows[0])
    assert longest + 2 <= read(DEMO / "pipeline.yaml").spec.prepare.context_length


def test_what_is_whole_is_kept_and_what_is_damaged_is_made_again(few, tmp_path):
    def births():
        return {path.name: path.stat().st_ino for path in (tmp_path / "data", tmp_path / "base-model")}

    material.make(tmp_path, steps=1, seed=SEED)
    first = births()
    (tmp_path / "published").mkdir()
    material.make(tmp_path, steps=1, seed=SEED)
    assert births() == first

    weights = tmp_path / "base-model" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + b"?")
    material.make(tmp_path, steps=1, seed=SEED)
    assert weights.read_bytes() == whole
    assert births()["data"] == first["data"]


def test_another_seed_or_more_steps_make_another_base_model(few, tmp_path):
    weights = tmp_path / "base-model" / "model.safetensors"
    seen = set()
    for steps, seed in ((1, 1), (2, 1), (1, 2)):
        material.make(tmp_path, steps=steps, seed=seed)
        seen.add(weights.read_bytes())
    assert len(seen) == 3


def test_the_exam_asks_in_the_words_of_the_training_records(few, tmp_path):
    material.make(tmp_path, steps=1, seed=SEED)
    task = yaml.safe_load((tmp_path / "data" / "task.yaml").read_text())
    record = json.loads((tmp_path / "data" / "train.jsonl").read_text().splitlines()[0])
    row = few[0][0]
    assert record["prompt"] == task["doc_to_text"].replace("{{text}}", row["text"])
    assert record["completion"] == " " + row["module"]
    assert task["doc_to_choice"] == list(docstrings.MODULES)
    assert (tmp_path / "data" / task["dataset_kwargs"]["data_files"]["test"]).is_file()


def test_the_manifest_finds_everything_on_one_volume():
    spec = read(DEMO / "pipeline.yaml").spec
    uris = [spec.model.uri, spec.dataset.uri, spec.push.target, *(task.file for task in spec.evaluate.tasks.values())]
    assert all(uri.startswith("pvc://demo/") for uri in uris)
    assert spec.evaluate.gate.threshold > 1 / len(docstrings.MODULES)
