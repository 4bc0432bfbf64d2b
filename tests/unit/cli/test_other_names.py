"""A setting under the name of another tool gets one message, with its name here."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.cli.other_names import (
    ANSWERED,
    ELSEWHERE,
    VALUES,
    WITHOUT_FIELD,
)

from finetune_cli.manifest.manifest import read_all
from finetune_cli.manifest.missing_fields import NO_FIELD
from finetune_cli.manifest.other_names import OTHER_NAMES

LEAST = {"model": {"uri": "base"}, "datasets": [{"uri": "data.jsonl"}]}
TASKS = {"tasks": [{"name": "exam"}]}


def written_at(path, value):
    """Return a valid spec but for this value, in place of what the setting replaces."""
    spec: dict[str, Any] = {
        key: deepcopy(part) for key, part in LEAST.items() if key != REPLACED.get(path)
    }
    stage = path.partition(".")[0]
    if stage in {"push", "deploy"} and path != "push.target":
        spec["push"] = {"targets": [{"uri": "published"}]}
    if stage == "evaluate":
        spec["evaluate"] = deepcopy(TASKS)
    if stage == "deploy":
        spec["deploy"] = {"when": "Always"}
    if path.startswith("evaluate.gates[]"):
        gate = {"task": "exam", "value": 0.5}
        spec["evaluate"]["gates"] = [
            {key: part for key, part in gate.items() if key != REPLACED.get(path)}
        ]
    put(spec, path.split("."), value)
    return spec


REPLACED = {
    "dataset_name": "datasets",
    "base_model": "model",
    "model_name_or_path": "model",
}


def put(spec, path, value):
    *above, last = path
    here = spec
    for step in above:
        name = step.removesuffix("[]")
        here = here.setdefault(name, [{}] if step.endswith("[]") else {})
        here = here[0] if step.endswith("[]") else here
    here[last] = value


@pytest.fixture
def diagnose(tmp_path, monkeypatch):
    """A function that returns the diagnostics of a spec, as texts without the file's name."""
    monkeypatch.chdir(tmp_path)

    def diagnose(spec):
        kind = {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "FineTunePipeline",
            "metadata": {"name": "demo"},
        }
        Path("p.yaml").write_text(
            yaml.safe_dump({**kind, "spec": spec}, sort_keys=False)
        )
        return [
            f"{diagnostic.path}: {diagnostic.message}"
            for diagnostic in read_all(Path("p.yaml")).diagnostics
        ]

    return diagnose


@pytest.mark.parametrize(("path", "name"), ANSWERED, ids=[path for path, _ in ANSWERED])
def test_other_name_is_answered_with_the_name_here(diagnose, path, name):
    where = f"spec.{path.replace('[]', '[0]')}"
    assert diagnose(written_at(path, 1)) == [
        f"{where}: unknown key; it is called {name} here"
    ]


@pytest.mark.parametrize(
    ("path", "reason"), WITHOUT_FIELD, ids=[path for path, _ in WITHOUT_FIELD]
)
def test_setting_without_a_field_is_answered_with_the_reason(diagnose, path, reason):
    (message,) = diagnose(written_at(path, 1))
    assert message.startswith(
        f"spec.{path.replace('[]', '[0]')}: unknown key; there is no such field: "
    )
    assert reason in message


@pytest.mark.parametrize(
    ("path", "name"), ELSEWHERE, ids=[path for path, _ in ELSEWHERE]
)
def test_name_in_another_place_is_answered_with_its_place(diagnose, path, name):
    value = True if path == "train.gradient_checkpointing" else 1
    assert diagnose(written_at(path, value)) == [
        f"spec.{path}: unknown key; did you mean {name}?"
    ]


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    VALUES,
    ids=[f"{path}-{value}" for path, value, _ in VALUES],
)
def test_value_of_another_version_is_answered_with_ours(
    diagnose, path, value, expected
):
    spec = written_at(path, value)
    if path == "push.when":
        spec["evaluate"] = {**TASKS, "gates": [{"task": "exam", "value": 0.5}]}
    (message,) = diagnose(spec)
    assert message.startswith(f"spec.{path.replace('[]', '[0]')}: must be ")
    assert expected in message


def test_every_other_name_is_tried_where_it_is_written():
    """Every answer of the table is then read once in its place."""
    words = {
        path.rpartition(".")[2].replace("_", "").lower()
        for path, _ in [*ANSWERED, *WITHOUT_FIELD]
    }
    assert {name.rpartition(".")[2] for name in [*OTHER_NAMES, *NO_FIELD]} <= words


@pytest.mark.parametrize(
    ("path", "value", "name"),
    [
        ("evaluate.tasks", {"exam": {}}, "exam"),
        ("train.pod.env", {"STEPS": "8"}, "STEPS"),
    ],
)
def test_list_written_as_a_mapping_is_answered_with_its_form(
    diagnose, path, value, name
):
    message = f"must be a list, with - name: {name} in place of {name}: (got a mapping)"
    assert diagnose(written_at(path, value)) == [f"spec.{path}: {message}"]
