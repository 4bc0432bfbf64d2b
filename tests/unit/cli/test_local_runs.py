"""Runs on this machine, found by name and listed; their records are written here, and no stage runs."""

import fcntl
import json
import sys
from argparse import Namespace
from datetime import UTC, datetime, timedelta

import pytest
import yaml
from support.operator.scenario import ALL_STAGES, Scenario, scores

from finetune_cli.__main__ import _parser, main
from finetune_cli.commands import run as run_command
from finetune_cli.runs import MANIFEST, UNTIL
from finetune_operator.core.pipeline import Key
from finetune_operator.local.pipeline_file import PipelineFile


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """A function that runs a command in an empty folder without a kubeconfig, and returns exit code and output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(
        sys.modules, "lm_eval", None
    )  # the tasks of scenarios are none of its own
    monkeypatch.setattr(
        "kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION",
        str(tmp_path / "none"),
    )

    def command(*arguments):
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return command


def record(folder, name, status, spec=None):
    """Store a run with a status that another scenario has reached, shifted to have started an hour ago."""
    started = datetime.now(UTC) - timedelta(hours=1)
    shift = started - status.started_at
    finished = status.finished_at + shift if status.finished_at else None
    text = status.model_copy(update={"started_at": started, "finished_at": finished})
    file = PipelineFile(folder)
    file.write_status(
        file.apply(Key("default", name), spec or Scenario().spec, {}), text
    )


def test_runs_are_listed_with_phase_score_duration_and_age(tmp_path, command):
    done = Scenario().finish(evaluate=scores(0.71, 0.02)).status
    record(tmp_path / ".finetune/done", "done", done)
    record(tmp_path / ".finetune/halted", "halted", Scenario().run("prepare").status)
    record(tmp_path / ".finetune/working", "working", Scenario().run("prepare").status)
    (tmp_path / ".finetune/broken").mkdir()
    (tmp_path / ".finetune/broken/pipeline.json").write_text("{")
    with (tmp_path / ".finetune/working/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, out = command("list")
    assert code == 0
    rows = {line.split()[0]: line.split() for line in out.splitlines()}
    assert rows["NAME"] == [
        "NAME",
        "PHASE",
        "STAGE",
        "PROGRESS",
        "SCORE",
        "DURATION",
        "AGE",
        "NOTES",
    ]
    assert rows["done"][:6] == ["done", "Succeeded", "deploy", "100%", "acc", "0.71"]
    assert rows["done"][-1].startswith("1h")
    assert rows["halted"][1] == "Stopped"
    assert rows["working"][1] != "Stopped"
    assert all(cell.startswith("1h") for cell in rows["working"][-2:])  # it works still
    assert rows["broken"] == ["broken", "Unreadable"]


def test_runs_in_other_folders_are_listed_by_their_path(tmp_path, command):
    record(tmp_path / "work/run", "demo", Scenario().finish().status)
    assert command("list") == (
        0,
        "no runs in .finetune; list the pipelines on a cluster with -n NAMESPACE or -A\n",
    )
    assert "work/run  Succeeded" in command("list", "work")[1]
    items = json.loads(command("list", "--json", "work/run")[1])["items"]
    assert [item["metadata"]["name"] for item in items] == ["demo"]


def test_several_runs_are_listed_by_get_and_shown_by_name(tmp_path, command):
    for name in ("one", "two"):
        record(tmp_path / ".finetune" / name, name, Scenario(name=name).finish().status)
    assert command("get") == command("list")
    code, out = command("get", "two")
    assert (code, out.splitlines()[0].split()[:2]) == (0, ["two", "Succeeded"])
    code, out = command("logs", "train")
    assert (code, out) == (
        2,
        "finetune: there are several runs in .finetune: one, two; name one\n",
    )


def test_unknown_name_is_answered_with_the_runs_there_are(tmp_path, command):
    record(tmp_path / ".finetune/docstrings", "docstrings", Scenario().finish().status)
    code, out = command("get", "docstring")
    assert code == 2
    assert out.endswith("no run docstring in ./.finetune; did you mean docstrings?\n")


def test_get_shows_gate_answer_and_what_serves_the_model(tmp_path, command):
    status = (
        Scenario()
        .finish(evaluate=scores(0.7, 0.02), deploy={"answer": " asyncio"})
        .status
    )
    record(tmp_path / ".finetune/demo", "demo", status)
    _, out = command("get", "demo")
    assert "gate open: exam acc = 0.7 ± 0.02 is above 0.6" in out
    assert "answered ' asyncio'" in out
    assert "serve: finetune run demo --keep-serving" in out


def test_claim_in_the_models_uri_is_shown_as_its_folder(tmp_path, command):
    record(tmp_path / ".finetune/demo", "demo", Scenario().finish().status)
    (tmp_path / "models").mkdir()
    (tmp_path / ".finetune/demo/claims").mkdir()
    (tmp_path / ".finetune/demo/claims/models").symlink_to(tmp_path / "models")
    assert "model: models/demo (sha256:push)" in command("get", "demo")[1]


def test_stopped_run_is_shown_with_the_command_to_continue(tmp_path, command):
    record(tmp_path / ".finetune/demo", "demo", Scenario().run("prepare").status)
    assert "to continue: finetune run demo" in command("get", "demo")[1]


def test_closed_gate_after_success_is_part_of_the_outcome(tmp_path, command):
    scenario = Scenario().finish(evaluate=scores(0.7))
    scenario.edit(evaluate={"gates": [{"task": "exam", "value": 0.9}]})
    record(
        tmp_path / ".finetune/demo",
        "demo",
        scenario.reconcile_until_stable().status,
        scenario.spec,
    )
    _, out = command("get", "demo")
    assert "gate closed: exam acc = 0.7 is not above 0.9" in out
    assert "BelowThreshold: exam acc = 0.7 is not above 0.9" in out


def test_run_by_name_needs_a_recorded_manifest(tmp_path, command):
    record(tmp_path / ".finetune/demo", "demo", Scenario().finish().status)
    code, out = command("plan", "demo")
    assert (code, out) == (
        2,
        "finetune: .finetune/demo has no recorded manifest; pass the manifest FILE instead of demo\n",
    )


def write_manifest(folder):
    """Write p.yaml with the spec of the scenarios, and the folder of the claim that it names."""
    (folder / "models").mkdir()
    kind = {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTunePipeline",
        "metadata": {"name": "demo"},
    }
    (folder / "p.yaml").write_text(yaml.safe_dump({**kind, "spec": ALL_STAGES}))


def test_resumed_run_has_every_option_of_run(tmp_path, command, monkeypatch):
    """The options come from the parser of `finetune run`, so that a new option cannot be forgotten."""
    folder = tmp_path / ".finetune/demo"
    spec = Scenario().spec.model_copy(update={"suspend": True})
    record(folder, "demo", Scenario().run("prepare").status, spec)
    write_manifest(tmp_path)
    (folder / MANIFEST).write_text(str(tmp_path / "p.yaml"))
    (folder / UNTIL).write_text("train")
    started: list[Namespace] = []
    monkeypatch.setattr(run_command, "run", started.append)
    command("resume", "demo")
    [options] = started
    assert options.file == str(tmp_path / "p.yaml")
    assert (options.workdir, options.until, options.detach) == (folder, "train", True)
    of_run = _parser(["run"]).parse_args(["run", "p.yaml"])
    assert vars(options).keys() == vars(of_run).keys() - {"command", "version"}


def test_run_that_until_ends_prints_how_to_continue(tmp_path, command):
    record(tmp_path / ".finetune/demo", "demo", Scenario().run("prepare").status)
    write_manifest(tmp_path)
    code, out = command(
        "run", "p.yaml", "--until", "prepare", "--claim", "models=models"
    )
    assert (code, out.splitlines()[-1]) == (
        0,
        "Stopped as --until asks. To continue: finetune run demo",
    )


def test_json_of_a_run_has_the_notes(tmp_path, command):
    status = Scenario().run("prepare", truncated=100).status
    record(tmp_path / ".finetune/demo", "demo", status)
    write_manifest(tmp_path)
    options = ("--until", "prepare", "--claim", "models=models", "--json")
    code, out = command("run", "p.yaml", *options)
    (note,) = json.JSONDecoder().raw_decode(out)[0]["notes"]
    assert (code, note["stage"], note["reason"]) == (0, "prepare", "RecordsTruncated")


def test_retry_of_a_succeeded_run_keeps_its_record(tmp_path, command):
    record(tmp_path / ".finetune/demo", "demo", Scenario().finish().status)
    before = PipelineFile(tmp_path / ".finetune/demo").read()
    write_manifest(tmp_path)
    code, out = command("retry", "p.yaml", "--claim", "models=models")
    assert code == 0, out
    assert out.startswith("default/demo: has finished (Succeeded) without a failure")
    assert out.count("\n") == 1
    after = PipelineFile(tmp_path / ".finetune/demo").read()
    assert before
    assert after
    assert after.status.stages == before.status.stages
