"""Sources and targets in stores, which `validate --check`, `plan` and `run` look at before anything starts."""

import json
import socket
import sys
import time

import pytest
import yaml
from support.cli.workspace import variables
from support.operator.scenario import ALL_STAGES, merged
from support.stores.hub_environment import use_hub
from support.stores.hub_server import serve_hub
from support.stores.hub_state import Hub

from finetune_cli.__main__ import main
from finetune_trainer.exit_codes import ExitCode
from finetune_trainer.stores.check import Item, look_at, look_at_all

pytestmark = pytest.mark.usefixtures("unread_data", "unloaded_tasks")

MODEL = {"config.json": b"{}", "model.safetensors": b"weights"}
DATA = {"train-0.jsonl": b'{"text": "one"}\n', "test.jsonl": b'{"text": "two"}\n'}
REMOTE = {
    "model": {"uri": "hf://org/base"},
    "datasets": [{"uri": "hf://org/data/train-*.jsonl"}],
    "push": {"targets": [{"uri": "hf://org/published"}]},
    "evaluate": {
        "tasks": [{"name": "arc_easy"}],
        "gates": [{"task": "arc_easy", "metric": "acc", "value": 0.5}],
    },
}
DEAD = "http://127.0.0.1:9"
SECRET = {"podDefaults": {"envFrom": [{"secretRef": {"name": "hub"}}]}}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with the model org/base and the data set org/data; the environment has a token of org."""
    state = Hub(tmp_path / "hub")
    state.add_token("hf_writer", "writer", ("org",))
    state.add_repository("org/base", MODEL)
    state.add_repository("org/data", DATA, kind="datasets")
    monkeypatch.chdir(tmp_path)
    with serve_hub(state):
        settings = {
            "HF_ENDPOINT": state.url,
            "HF_TOKEN": "hf_writer",
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(tmp_path),
        }
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        yield state


@pytest.fixture
def check(tmp_path, capsys):
    """A function that runs a command on a manifest with these changes, and returns exit code and output."""

    def check(*command, **changes):
        spec = merged(merged(ALL_STAGES, REMOTE), changes)
        kind = {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "FineTunePipeline",
            "metadata": {"name": "demo"},
        }
        (tmp_path / "p.yaml").write_text(
            yaml.safe_dump({**kind, "spec": spec}, sort_keys=False)
        )
        code = main([*(command or ("validate", "--check")), "p.yaml"])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return check


def test_sources_and_targets_that_a_hub_has_are_valid(hub, check):
    assert check() == (0, "p.yaml: valid\n")
    assert not hub.repository("org/published")


def test_manifest_is_valid_without_network_unless_asked(hub, check):
    assert check("validate") == (0, "p.yaml: valid\n")
    assert hub.requests() == []


@pytest.mark.parametrize("command", [("validate", "--check"), ("plan",), ("run",)])
def test_unusable_remotes_are_reported_with_their_fields(hub, check, tmp_path, command):
    code, out = check(
        *command,
        model={"uri": "hf://org/bsae"},
        datasets=[{"uri": "hf://org/data", "split": "dev"}],
        push={"targets": [{"uri": "hf://org/base"}]},
    )
    assert code == 2
    expected = {
        "spec.model.uri": "correct the name: there is no model org/bsae",
        "spec.datasets[0].uri": "set split to one of test, train",
        "spec.push.targets[0].uri": "was not written by a push",
    }
    for field, message in expected.items():
        assert message in next(
            line for line in out.splitlines() if f": {field}: " in line
        )
    assert all(line.startswith("p.yaml:") for line in out.splitlines()[:3])
    assert not list(tmp_path.glob(".finetune/*/jobs"))


@pytest.mark.parametrize(
    ("item", "code", "message"),
    [
        (
            Item("hf://org/base", "model", revision="v9"),
            ExitCode.NOT_FOUND,
            "has no such branch, tag or commit",
        ),
        (Item("hf://org/empty", "model"), ExitCode.NOT_FOUND, "has no config.json"),
        (
            Item("hf://other/gated", "model"),
            ExitCode.CREDENTIALS,
            "access is by licence: accept it at",
        ),
        (
            Item("hf://org/data/trian-*.jsonl", "dataset"),
            ExitCode.NOT_FOUND,
            "has no such file",
        ),
        (Item("hf://other/published", "target"), None, ""),
        (
            Item("s3://bucket/model-*", "target"),
            ExitCode.CONFIG,
            "a prefix without a pattern",
        ),
        (Item("s3://", "model"), ExitCode.CONFIG, "names no objects"),
    ],
)
def test_item_that_a_stage_cannot_use_has_its_exit_code(
    hub, monkeypatch, item, code, message
):
    use_hub(hub, monkeypatch, "hf_writer")
    hub.add_repository("org/empty", {"notes.txt": b"none"})
    hub.add_repository("other/gated", MODEL, gated=True)
    problem = look_at(item)
    assert (problem and problem.exit_code) == code
    assert problem is None or message in problem.message


def test_wrong_token_is_an_error_with_the_fix(hub, check, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    code, out = check()
    assert code == 2
    assert "spec.model.uri: the hub answers 401" in out
    assert "set HF_TOKEN in envFrom to a token that may access it" in out


def test_missing_token_is_an_error_for_the_target_only(hub, check, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    code, out = check()
    assert code == 2
    assert out.splitlines() == [
        line
        for line in out.splitlines()
        if "spec.push.targets[0].uri: a push needs" in line
    ]


def test_token_of_a_secret_is_not_missed_by_validate(hub, check, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    code, out = check(**SECRET)
    assert code == 0
    assert (
        "p.yaml: hf://org/published: a push needs a token; set HF_TOKEN in envFrom to one (note)"
        in out
    )
    assert check("plan", **SECRET)[0] == 2


def test_variables_of_a_stage_take_precedence(hub, check, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", DEAD)
    monkeypatch.delenv("HF_TOKEN")
    defaults = {
        "podDefaults": {"env": variables(HF_ENDPOINT=hub.url, HF_TOKEN="hf_writer")}
    }
    code, out = check(**defaults)
    assert (code, out.splitlines()[-1], "not looked at" in out) == (
        0,
        "p.yaml: valid",
        False,
    )


@pytest.mark.parametrize(
    "shell", [{"HF_TOKEN": "hf_writer"}, {"HUGGING_FACE_HUB_TOKEN": "hf_writer"}, {}]
)
def test_token_is_not_sent_to_a_hub_of_the_manifest(
    hub, check, tmp_path, monkeypatch, shell
):
    (tmp_path / "token").write_text("hf_writer")  # of `hf auth login`
    monkeypatch.setenv("HF_ENDPOINT", DEAD)
    monkeypatch.delenv("HF_TOKEN")
    for name, value in shell.items():
        monkeypatch.setenv(name, value)
    hub.add_repository("org/base", MODEL, private=True)
    code, out = check(podDefaults={"env": variables(HF_ENDPOINT=hub.url)})
    assert code == 0
    assert (
        "hf://org/base: not looked at: the manifest sets HF_ENDPOINT, so credentials of this shell"
        in out
    )
    assert "the hub answers 401" in out


def test_manifest_runs_no_code_in_a_check(hub, check, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    code, _ = check(
        podDefaults={"env": variables(PYTHONPATH=str(tmp_path), LD_PRELOAD="x.so")}
    )
    assert (code, (tmp_path / "ran").exists()) == (0, False)


def test_store_that_is_gone_is_an_error_of_validate_only(hub, check, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", DEAD)
    code, out = check()
    assert (code, out.count("cannot be reached")) == (2, 3)
    code, out = check("plan")
    assert code == 0
    assert f"hf://org/base: {DEAD} cannot be reached" in out


def test_run_with_a_store_that_is_gone_starts_with_a_warning(hub, check, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", DEAD)
    pod = {"pod": {"command": ["sh", "-c", "exit 64"]}}
    stages = dict.fromkeys(("prepare", "evaluate", "push", "deploy"), pod)
    code, out = check("run", "--until", "prepare", **stages, train={"maxSteps": 1})
    assert code == 1  # prepare has started, and failed
    assert f"NotLookedAt: hf://org/base: {DEAD} cannot be reached" in out


def test_remote_stays_unknown_without_the_trainers_packages(
    hub, check, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "finetune_cli.checks.trainer_process.COMMAND",
        ("python", "-c", "import no_such_package"),
    )
    code, out = check()
    assert code == 0
    assert (
        out.count(
            "not looked at; the stage that uses it reports whether it exists and may be used (note)"
        )
        == 3
    )
    assert (
        len(
            json.loads(check("validate", "--check", "--json")[1])["files"][0][
                "notLookedAt"
            ]
        )
        == 3
    )


def test_library_that_is_not_installed_leaves_a_source_unknown(monkeypatch):
    monkeypatch.setitem(sys.modules, "google.cloud", None)
    monkeypatch.delitem(
        sys.modules, "finetune_trainer.stores.objects.google_bucket", raising=False
    )
    problem = look_at(Item("gs://bucket/base", "model"))
    assert problem is not None
    assert problem.exit_code is ExitCode.BUG
    assert "needs the library google-cloud-storage" in problem.message


def test_server_that_never_answers_takes_no_more_than_the_budget(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        problems = look_at_all(
            [Item("hf://org/base", "model"), Item("data.jsonl", "dataset")], budget=3
        )
    assert time.monotonic() - started < 6
    assert [problem and problem.exit_code for problem in problems] == [
        ExitCode.UNAVAILABLE,
        None,
    ]
