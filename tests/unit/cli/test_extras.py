"""Packages that a run on this machine needs are looked for before anything starts."""

import importlib.util
from pathlib import Path

import pytest
import yaml

from finetune_cli.__main__ import main
from finetune_cli.checks.extras import PACKAGES, is_installed

SPEC = {
    "model": {"uri": "base"},
    "datasets": [{"uri": "data.jsonl"}],
    "train": {"maxSteps": 2},
}


@pytest.fixture
def check(tmp_path, monkeypatch, capsys, unread_data):
    """A function that checks a manifest on a machine without the optional packages."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text('{"text": "one"}\n')
    find = importlib.util.find_spec
    hidden = {package.partition(".")[0] for package in PACKAGES.values()}
    monkeypatch.setattr(
        "finetune_cli.checks.extras.importlib.util.find_spec",
        lambda name: None if name.partition(".")[0] in hidden else find(name),
    )

    def check(*command, **changes):
        kind = {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "FineTunePipeline",
            "metadata": {"name": "demo"},
        }
        (tmp_path / "p.yaml").write_text(
            yaml.safe_dump({**kind, "spec": {**SPEC, **changes}})
        )
        code = main([*(command or ("validate", "--check")), "p.yaml"])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return check


SETTINGS = [
    ({"train": {"method": "QLoRA"}}, "spec.train.method", "qlora"),
    ({"train": {"optimizer": {"name": "AdamW8Bit"}}}, "spec.train.optimizer.name", "qlora"),
    ({"tracking": {"wandb": {"project": "p"}}}, "spec.tracking.wandb", "wandb"),
    ({"tracking": {"mlflow": {"uri": "http://127.0.0.1:9"}}}, "spec.tracking.mlflow", "mlflow"),
    ({"tracking": {"tensorboard": {"uri": "logs"}}}, "spec.tracking.tensorboard", "tensorboard"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "field", "extra"), SETTINGS)
@pytest.mark.parametrize("command", [("validate", "--check"), ("run",)])
def test_setting_without_its_package_is_refused(check, changes, field, extra, command):
    code, out = check(*command, **changes)
    assert code == 2
    assert f"{field}: " in out
    assert f"needs the package {PACKAGES[extra]}, which is not installed here" in out
    assert f"pip install 'finetune-operator[{extra}]'" in out
    assert not list(Path.cwd().glob(".finetune/*/jobs"))


def test_store_without_its_package_is_refused(check):
    code, out = check(push={"targets": [{"uri": "gs://bucket/model"}]})
    assert code == 2
    assert "pip install 'finetune-operator[gcs]'" in out


def test_manifest_for_a_cluster_only_gets_a_note(check):
    """The claim is not on this machine, so the manifest runs on a cluster, whose image has the package."""
    code, out = check(
        train={"method": "QLoRA"}, datasets=[{"uri": "pvc://team/data.jsonl"}]
    )
    assert code == 0
    assert "spec.train.method: QLoRA needs the package bitsandbytes" in out


def test_own_program_needs_no_package(check):
    train = {"method": "QLoRA", "pod": {"command": ["python", "train.py"]}}
    code, out = check(train=train)
    assert code == 0, out


def test_package_below_a_missing_package_is_missing():
    assert not is_installed("no_such_package.below")
    assert is_installed("json")
