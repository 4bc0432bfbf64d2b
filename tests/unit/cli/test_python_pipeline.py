"""`finetune.Pipeline`: the manifest as an object, with the identities that it has as a file."""

import json
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

import finetune
from finetune_cli.manifest.manifest import read
from finetune_operator.core.assess import assess
from finetune_operator.core.observation import Observation
from finetune_operator.core.pipeline import Key, Pipeline

ROOT = Path(__file__).parents[3]
NOW = datetime(2026, 1, 1, tzinfo=UTC)
MANIFESTS = sorted(
    path
    for path in (ROOT / "examples").glob("*/*.yaml")
    if "kind: FineTunePipeline" in path.read_text()
)
DEMO = ROOT / "examples/demo/pipeline.yaml"
SMALL = {"model": {"uri": "hf://a/b"}, "datasets": [{"uri": "hf://c/d"}]}
SOURCES = """\
import linecache
from finetune import Pipeline
print(*linecache.cache)
"""
START = """\
import sys, time
start = time.process_time()
import finetune
print(time.process_time() - start)
finetune.Pipeline, finetune.get
print(*sys.modules)
"""


def hashes(manifest):
    """Return identity and execution of each stage."""
    key = Key(manifest.namespace, manifest.name)
    pipeline = Pipeline(key, "0f1e2d3c", 1, manifest.spec)
    stages = assess(pipeline, Observation(), NOW).stages
    return {
        name: (stage.status.identity, stage.status.execution)
        for name, stage in stages.items()
    }


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.parent.name)
def test_python_pipeline_has_the_identities_of_its_manifest(path):
    written = read(path)
    spec = finetune.PipelineSpec.model_validate_json(json.dumps(written.body["spec"]))
    made = finetune.Pipeline(written.name, spec, namespace=written.namespace)
    again = finetune.Pipeline.from_yaml(made.to_yaml())
    assert again.spec == written.spec
    assert hashes(again.manifest) == hashes(written)


def test_demo_of_typed_models_is_the_demo_of_yaml():
    spec = finetune.PipelineSpec(
        seed=7,
        model=finetune.ModelSource(uri="pvc://demo/base-model"),
        datasets=(finetune.Dataset(uri="pvc://demo/data/train.jsonl"),),
        prepare=finetune.Prepare(context_length=128),
        train=finetune.Train(
            epochs=6,
            micro_batch_size=8,
            dtype="FP32",
            lora=finetune.Lora(rank=16, alpha=32, dropout=0.05),
            optimizer=finetune.Optimizer(learning_rate=5e-3),
            eval_steps=100,
        ),
    )
    made = finetune.Pipeline("docstrings", spec)
    written = hashes(read(DEMO))
    identities = {name: hashes(made.manifest)[name][0] for name in ("prepare", "train")}
    assert identities == {name: written[name][0] for name in identities}


@pytest.mark.parametrize(
    "text",
    ["y", "NO", "1e3", "010", "0x1f", "1_0", "~", "2030-01-01", "<<", "", "a: b"],
)
def test_text_stays_a_text_in_yaml(text):
    program = {
        "command": ["true"],
        "env": [{"name": "X", "value": text}],
    }
    made = finetune.Pipeline("demo", {**SMALL, "train": {"pod": program}})
    again = finetune.Pipeline.from_yaml(made.to_yaml())
    assert again.manifest.body["spec"]["train"]["pod"]["env"][0]["value"] == text


def test_yaml_has_only_what_was_set(tmp_path):
    spec = finetune.PipelineSpec.model_validate(SMALL)
    made = finetune.Pipeline("demo", spec, namespace="team")
    text = made.to_yaml(tmp_path / "demo.yaml")
    assert yaml.safe_load(text) == {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTunePipeline",
        "metadata": {"name": "demo", "namespace": "team"},
        "spec": SMALL,
    }
    assert (tmp_path / "demo.yaml").read_text() == text


def test_mapping_may_hold_models():
    mixed = {**SMALL, "train": finetune.Train(max_steps=3)}
    assert finetune.Pipeline("demo", mixed).manifest.body["spec"]["train"] == {
        "maxSteps": 3
    }


def test_overrides_are_those_of_set():
    made = finetune.Pipeline.from_yaml(
        DEMO, overrides=["train.epochs=1", "metadata.name=short"]
    )
    assert made.name == "short"
    assert made.spec.train.epochs == 1


def test_broken_pipeline_has_the_errors_of_the_command_line():
    with pytest.raises(finetune.InvalidManifest) as broken:
        finetune.Pipeline("demo", {**SMALL, "trian": {"epochs": 0}})
    assert "spec.trian: unknown key; did you mean train?" in str(broken.value)
    assert len(broken.value.diagnostics) == 2


@pytest.mark.parametrize("source", ["nowhere.yaml", Path("nowhere.yaml")])
def test_missing_file_is_an_error_with_its_name(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(finetune.InvalidManifest, match=r"nowhere\.yaml"):
        finetune.Pipeline.from_yaml(source)


def test_second_pipeline_of_a_text_is_refused():
    text = finetune.Pipeline("demo", SMALL).to_yaml()
    with pytest.raises(finetune.InvalidManifest, match="a second pipeline"):
        finetune.Pipeline.from_yaml(f"{text}---\n{text}")


def test_import_is_quick_and_brings_no_large_library():
    runs = [
        subprocess.run(
            [sys.executable, "-c", START], capture_output=True, text=True, check=True
        ).stdout.split("\n", 1)
        for _ in range(3)
    ]
    loaded = {name.partition(".")[0] for name in runs[0][1].split()}
    assert not loaded & {"torch", "transformers", "kubernetes", "aiohttp", "IPython"}
    # CPU time of the quickest: other programs of the machine do not count.
    assert min(float(seconds) for seconds, _ in runs) < 0.5


def test_no_source_is_read_for_the_docstrings_of_fields():
    """Reading them takes 0.3 s of CPU, and only a schema has them."""
    done = subprocess.run(
        [sys.executable, "-c", SOURCES], capture_output=True, text=True, check=True
    )
    files = [path for path in done.stdout.split() if str(ROOT) in path]
    assert files == []


def test_names_of_the_interface_are_those_of_the_package():
    names = dir(finetune)
    assert {"Pipeline", "get", "UsageError"} <= set(names)
    assert all(hasattr(finetune, name) for name in names)
    with pytest.raises(AttributeError, match="no attribute 'pipeline_of'"):
        _ = finetune.pipeline_of  # type: ignore[attr-defined]


def test_wheel_has_every_package_of_the_repository():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    packages = {
        str(path.parent.relative_to(ROOT))
        for folder in ("operator", "trainer")
        for path in (ROOT / folder).glob("*/__init__.py")
    }
    assert set(wheel) == packages
