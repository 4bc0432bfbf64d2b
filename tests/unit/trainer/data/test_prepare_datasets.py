"""The stage prepare with several data sets: files, weights, splits and digests."""

import hashlib
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.stores.hub_environment import hub_in
from support.trainer.models import prompt_records, write_jsonl
from support.trainer.prepared import (
    IDENTITY,
    make_tokenizer,
    packed_documents,
    prepare,
    prepare_again,
    prepare_config,
)
from support.trainer.stages import run_to_failure

from finetune_trainer.contract import Environment, ExitCode, PrepareConfig
from finetune_trainer.data.documents import Split
from finetune_trainer.data.reading import record_batches
from finetune_trainer.runtime.artifacts import digest_file

CHAT = [
    {"role": "user", "content": "the file?"},
    {"role": "assistant", "content": "a socket"},
]


@pytest.fixture
def model(tokenizer_folder: Path) -> Path:
    return tokenizer_folder


def texts(*numbers: int) -> list[dict[str, object]]:
    return [{"text": f"{number} opens the file"} for number in numbers]


def uses(environment: Environment, split: Split = "train") -> Counter[tuple[int, ...]]:
    """Return how often each document is in the rows of a split."""
    return Counter(tuple(tokens) for tokens, _ in packed_documents(environment, split))


def test_one_data_set_gives_the_rows_of_a_small_model(
    tmp_path: Path, environment: Environment, manifest_dir: Path
) -> None:
    """Without packing a row is a record, in the order of the file. The first releases have the same split."""
    tokenizer = make_tokenizer(tmp_path / "model")
    write_jsonl(manifest_dir / "data.jsonl", prompt_records(300))
    config = PrepareConfig.model_validate(
        {
            "identity": IDENTITY,
            "seed": 7,
            "model": {"uri": f"file://{tmp_path}/model"},
            "datasets": [{"uri": "data.jsonl"}],
            "recipe": {"contextLength": 64, "packing": False},
        }
    )
    prepare(config, environment)

    expected: dict[Split, list[list[int]]] = {"train": [], "validation": []}
    for number, record in enumerate(prompt_records(300)):
        digest = hashlib.sha256(f"7:{number}".encode()).hexdigest()
        split: Split = "validation" if int(digest[:16], 16) < 0.05 * 2**64 else "train"
        text = record["prompt"] + record["completion"]
        expected[split].append([*tokenizer(text).input_ids, tokenizer.eos_token_id])
    assert 5 < len(expected["validation"]) < 30
    for split, rows in expected.items():
        assert [tokens for tokens, _ in packed_documents(environment, split)] == rows


def test_files_and_data_sets_are_read_in_order(
    model: Path, environment: Environment, manifest_dir: Path
) -> None:
    write_jsonl(manifest_dir / "b-2.jsonl", texts(3))
    write_jsonl(manifest_dir / "b-1.jsonl", texts(1, 2))
    write_jsonl(manifest_dir / "a.jsonl", texts(4))
    write_jsonl(manifest_dir / "all.jsonl", texts(1, 2, 3, 4))
    datasets = [{"uri": "b-*.jsonl"}, {"uri": "a.jsonl"}]
    result = prepare(prepare_config(model, datasets=datasets), environment)
    rows = packed_documents(environment)

    assert result.records == 4
    digests = "".join(
        f"{digest_file(manifest_dir / f'{name}.jsonl')}\n"
        for name in ("b-1", "b-2", "a")
    )
    assert (
        result.data_digest == "sha256:" + hashlib.sha256(digests.encode()).hexdigest()
    )
    prepare_again(prepare_config(model, "all.jsonl"), environment)
    assert packed_documents(environment) == rows


def test_records_of_every_file_are_named_by_file_and_line(
    model: Path, environment: Environment, manifest_dir: Path
) -> None:
    for name in ("a/x-1.jsonl", "a/x-2.jsonl", "b/x-1.jsonl"):
        (manifest_dir / name).parent.mkdir(exist_ok=True)
        write_jsonl(manifest_dir / name, [*texts(1), {"words": 1}])
    message, _ = run_to_failure(
        prepare_config(model, datasets=[{"uri": "a/x-*.jsonl"}]), environment
    )
    assert message.endswith("text is missing; first x-1.jsonl:2, x-2.jsonl:2")

    datasets = [{"uri": "a/x-*.jsonl"}, {"uri": "b/x-1.jsonl"}, {"uri": "b/x-1.jsonl"}]
    message, _ = run_to_failure(prepare_config(model, datasets=datasets), environment)
    assert message.endswith("first a/x-1.jsonl:2, a/x-2.jsonl:2, b/x-1.jsonl:2")


def test_data_set_without_records_is_named(
    model: Path, environment: Environment, manifest_dir: Path
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", texts(1))
    (manifest_dir / "empty-1.jsonl").touch()
    (manifest_dir / "empty-2.jsonl").touch()

    datasets = [{"uri": "data.jsonl"}, {"uri": "empty-?.jsonl"}]
    message, code = run_to_failure(
        prepare_config(model, datasets=datasets), environment
    )
    assert (code, message) == (
        ExitCode.DATA,
        "empty-?.jsonl has no records; add records or correct datasets[1].uri",
    )


def test_validation_records_are_drawn_from_each_data_set(
    model: Path, environment: Environment, manifest_dir: Path
) -> None:
    write_jsonl(manifest_dir / "a.jsonl", texts(*range(500)))
    write_jsonl(manifest_dir / "b.jsonl", texts(*range(500, 1000)))
    drawn = {}
    for name in ("a", "b", "ab"):
        datasets = [{"uri": f"{part}.jsonl"} for part in name]
        prepare_again(
            prepare_config(model, datasets=datasets, validation_fraction=0.1),
            environment,
        )
        drawn[name] = uses(environment, "validation")
        assert not drawn[name] & uses(environment)

    assert all(25 < len(drawn[name]) < 80 for name in "ab")
    assert drawn["ab"] == drawn["a"] + drawn["b"]


def test_own_validation_set_validates_and_never_trains(
    model: Path, environment: Environment, manifest_dir: Path
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", texts(1, 2, 3))
    write_jsonl(
        manifest_dir / "held-out.jsonl", [{"body": "a socket"}, {"body": "a lock"}]
    )
    validation = {"uri": "held-out.jsonl", "columns": {"text": "body"}}
    result = prepare(prepare_config(model, validation=validation), environment)

    assert (uses(environment).total(), uses(environment, "validation").total()) == (
        3,
        2,
    )
    assert not uses(environment) & uses(environment, "validation")
    assert result.records == 5


@pytest.mark.parametrize(
    ("weight", "least", "most", "average"),
    [(0.3, 0, 1, 0.3), (2, 2, 2, 2), (2.5, 2, 3, 2.5)],
)
def test_weight_is_how_often_each_record_is_used(
    *,
    model: Path,
    environment: Environment,
    manifest_dir: Path,
    weight: float,
    least: int,
    most: int,
    average: float,
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", texts(*range(2000)))
    prepare(prepare_config(model), environment)
    every = uses(environment)
    result = prepare_again(prepare_config(model, weight=weight), environment)
    weighted = uses(environment)

    assert weighted.keys() <= every.keys()
    assert {weighted[document] for document in every} == set(range(least, most + 1))
    assert weighted.total() / 2000 == pytest.approx(average, rel=0.06)
    assert result.unused == 2000 - len(weighted)
    assert result.records == 2000


def test_larger_weight_uses_the_same_records_and_more(
    model: Path, environment: Environment, manifest_dir: Path
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", texts(*range(500)))
    uses_by_weight = []
    for weight in (0.2, 0.7, 1.3, 2):
        prepare_again(prepare_config(model, weight=weight), environment)
        uses_by_weight.append(uses(environment))

    assert all(smaller < larger for smaller, larger in pairwise(uses_by_weight))


def test_validation_records_are_sampled_and_not_repeated(
    model: Path, environment: Environment, manifest_dir: Path
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", texts(*range(1000)))
    prepare_again(prepare_config(model, validation_fraction=0.5), environment)
    every = uses(environment, "validation")
    prepare_again(prepare_config(model, validation_fraction=0.5, weight=3), environment)
    assert uses(environment, "validation") == every
    assert set(uses(environment).values()) == {3}

    prepare_again(
        prepare_config(model, validation_fraction=0.5, weight=0.3), environment
    )
    assert uses(environment, "validation") < every
    assert 100 < uses(environment, "validation").total() < 200


def test_uses_of_a_record_are_in_different_rows(
    model: Path, environment: Environment, manifest_dir: Path
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", texts(*range(1000)))
    prepare(prepare_config(model, weight=2), environment)

    documents = [tuple(tokens) for tokens, _ in packed_documents(environment)]
    for document in documents[:50]:
        first = documents.index(document)
        second = documents.index(document, first + 1)
        assert second - first > 100
        assert documents.count(document) == 2


def test_unused_invalid_record_does_not_count(
    model: Path, environment: Environment, manifest_dir: Path
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", [{"words": 1}] * 200)
    message, _ = run_to_failure(prepare_config(model, weight=0.1), environment)
    words = message.split()
    invalid = int(words[0])
    used = int(words[2])
    assert 5 < invalid == used < 50


def test_weights_that_leave_nothing_are_refused(
    model: Path, environment: Environment, manifest_dir: Path
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", texts(1))
    message, code = run_to_failure(prepare_config(model, weight=1e-9), environment)
    assert code == ExitCode.DATA
    assert (
        "the weights leave out all 1 records; raise the weights in datasets" in message
    )


def test_data_sets_of_different_shapes_train_together(
    model: Path,
    environment: Environment,
    manifest_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch ends with its data set."""
    monkeypatch.setattr(record_batches, "BATCH_RECORDS", 7)
    kinds: dict[str, list[Any]] = {
        "chat": [{"messages": CHAT}] * 5,
        "prompts": prompt_records(10),
        "texts": texts(*range(5)),
    }
    together: Counter[tuple[int, ...]] = Counter()
    for name, rows in kinds.items():
        write_jsonl(manifest_dir / f"{name}.jsonl", rows)
        alone = prepare_again(prepare_config(model, f"{name}.jsonl"), environment)
        assert alone.conversations == (name == "chat")
        together += uses(environment)
    result = prepare_again(
        prepare_config(model, datasets=[{"uri": f"{name}.jsonl"} for name in kinds]),
        environment,
    )

    assert uses(environment) == together
    assert result.conversations
    assert result.records == 20
    assert result.invalid == 0


def test_shape_may_change_between_data_sets_only(
    model: Path, environment: Environment, manifest_dir: Path
) -> None:
    write_jsonl(manifest_dir / "a-1.jsonl", texts(1))
    write_jsonl(manifest_dir / "a-2.jsonl", prompt_records(1))

    message, _ = run_to_failure(prepare_config(model, "a-?.jsonl"), environment)
    prepare(
        prepare_config(model, datasets=[{"uri": "a-1.jsonl"}, {"uri": "a-2.jsonl"}]),
        environment,
    )
    assert (
        "a-2.jsonl:1: has prompt and completion, but earlier records have text: use one shape per data"
        in message
    )


def test_result_has_the_commit_of_each_data_set_of_a_hub(
    model: Path,
    environment: Environment,
    manifest_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_jsonl(manifest_dir / "data.jsonl", texts(1, 2))
    with hub_in(tmp_path / "hub", monkeypatch) as hub:
        data = hub.add_repository(
            "people/held-out", {"rows.jsonl": b'{"text": "a lock"}\n'}, kind="datasets"
        )
        config = prepare_config(
            model, validation={"uri": "hf://people/held-out/rows.jsonl"}
        )
        assert prepare(config, environment).data_pins == (None, data.head)
