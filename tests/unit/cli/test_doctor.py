"""`finetune doctor`: each thing that a run may lack is named with its fix."""

import json
import os

import pytest

from finetune_cli.__main__ import main
from finetune_cli.checks.extras import is_installed
from finetune_cli.local import machine
from finetune_cli.local.machine import Verdict, machine_findings
from finetune_trainer.contract import Environment
from finetune_trainer.stores.model_files import download_folder


def of(subject, findings):
    [finding] = [finding for finding in findings if finding.subject == subject]
    return finding


@pytest.fixture
def without(monkeypatch):
    """A function that makes packages look as if they were not installed."""

    def without(*packages):
        installed = is_installed
        monkeypatch.setattr(
            machine,
            "is_installed",
            lambda name: name not in packages and installed(name),
        )

    return without


def test_machine_with_all_packages_has_no_error(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    subjects = [finding["subject"] for finding in findings]
    assert subjects == [
        "finetune", "python", "trainer", "extras", "gpu", "memory", "disk", "hub", "cluster",
    ]  # fmt: skip
    verdicts = {finding["subject"]: finding["verdict"] for finding in findings}
    assert verdicts["trainer"] == "ok"
    assert verdicts["cluster"] == "note"


def test_missing_trainer_is_an_error_with_the_fix(without, tmp_path):
    without("torch", "peft")
    finding = of("trainer", machine_findings(tmp_path, {}))
    assert finding.verdict is Verdict.ERROR
    assert finding.message == (
        "torch, peft not installed: pip install 'finetune-operator[trainer]'"
    )


def test_missing_extra_is_a_note_with_the_fix(without, tmp_path):
    without("torch", "bitsandbytes")
    finding = of("extras", machine_findings(tmp_path, {}))
    assert finding.verdict is Verdict.NOTE
    assert "qlora: pip install 'finetune-operator[qlora]'" in finding.message


def test_driver_that_pytorch_cannot_use_is_an_error(monkeypatch, tmp_path):
    answers = {"nvidia-smi": ["NVIDIA T4, 470.1, 15360 MiB"]}
    monkeypatch.setattr(
        machine, "_output", lambda command: answers.get(command[0], ["2.13.0"])
    )
    finding = of("gpu", machine_findings(tmp_path, {}))
    assert finding.verdict is Verdict.ERROR
    assert "NVIDIA T4, 470.1, 15360 MiB; PyTorch sees none" in finding.message


def test_small_disk_and_offline_hub_are_said(monkeypatch, without, tmp_path):
    without("torch")
    monkeypatch.setattr(machine, "ENOUGH_DISK", 2**62)
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": "/data/hf"}
    findings = list(machine_findings(tmp_path, environment))
    assert of("disk", findings).verdict is Verdict.NOTE
    assert "files in /data/hf/hub are copied" in of("hub", findings).message
    assert "HF_HUB_OFFLINE" in of("hub", findings).message


@pytest.mark.parametrize("name", ["XDG_CACHE_HOME", "FINETUNE_CACHE"])
def test_folder_of_downloads_is_where_runs_download_to(
    name, monkeypatch, without, tmp_path
):
    without("torch")
    monkeypatch.delenv("FINETUNE_CACHE")
    monkeypatch.setenv(name, str(tmp_path / "caches"))
    run = Environment(tmp_path / "workspace", manifest_dir=tmp_path)
    folder = download_folder(run)
    assert folder.is_relative_to(tmp_path / "caches")
    finding = of("hub", machine_findings(tmp_path, os.environ))
    assert f"downloads are kept in {folder}," in finding.message


def test_cluster_is_an_error_only_if_it_is_asked_for(
    without, tmp_path, monkeypatch, capsys
):
    without("torch")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert main(["doctor", "-n", "team"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("error  cluster   no kubeconfig")


def test_commands_are_named_as_other_programs_name_them(tmp_path, capsys):
    assert main([]) == 0
    assert "doctor" in capsys.readouterr().out
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("finetune ")
    with pytest.raises(SystemExit) as end:
        main(["help", "run"])
    assert end.value.code == 0
    assert "usage: finetune run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runn"], "there is no command 'runn'; did you mean run?"),
        (["xyzzy"], "there is no command 'xyzzy'; `finetune --help` lists all"),
        (
            ["run", "a.yaml", "--keepserving"],
            "run has no option --keepserving; did you mean --keep-serving?",
        ),
        (["plan", "a.yaml", "b.yaml"], "plan takes no further argument 'b.yaml'"),
    ],
)
def test_misspelled_word_has_the_closest(capsys, words, message):
    assert main(words) == 2
    assert message in capsys.readouterr().err
