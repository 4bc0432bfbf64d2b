import importlib
import io
import os
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from support.cli.session import CliSession
from support.operator.fake_api_server import kubeconfig, serving
from support.operator.scenario import Scenario

from finetune_cli.checks import preview as checks_preview
from finetune_cli.checks import trainer_process
from finetune_cli.checks.proposal import BaseAnswer
from finetune_cli.manifest.manifest import read_all
from finetune_trainer.contract.preview import PreviewReport


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    """A command line in an empty folder; its kubeconfig has the contexts `here` (namespace team) and `plain` (none)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("finetune_cli.cluster.session.API_RETRY_SECONDS", 3)
    with serving() as (api, url):
        file = tmp_path / "kubeconfig"
        file.write_text(kubeconfig(url, here="team", plain=None))
        monkeypatch.setattr(
            "kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file)
        )
        yield CliSession(api, tmp_path, capsys)


@pytest.fixture
def scenario(cli):
    """The pipeline team/demo on the fake API server."""
    return cli.api.add(Scenario().reconcile_until_stable())


@pytest.fixture
def type_lines(monkeypatch):
    """A function that types lines into a command, and then Ctrl-D."""

    def type_lines(*lines):
        left = iter(lines)

        def input_line(_prompt):
            try:
                return next(left)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", input_line)

    return type_lines


@pytest.fixture
def unread_data(monkeypatch):
    """A check of sources that reads no records: a preview needs a whole model, and takes seconds."""
    monkeypatch.setattr(
        "finetune_cli.local.run.ask_trainer", lambda *_: PreviewReport()
    )


@pytest.fixture
def any_base(monkeypatch):
    """An init that takes a folder with any config.json for a base model."""
    monkeypatch.setattr(
        "finetune_cli.commands.init.look_at_base", lambda *_: BaseAnswer()
    )


@pytest.fixture
def trainer_here(monkeypatch):
    """The trainer's programs answer in this process: a new process imports PyTorch for seconds.

    test_model_check.py and test_preview_command.py start each program once as a real process.
    """

    def run_here(module, text, environment, _seconds):
        program = importlib.import_module(module)
        if not hasattr(program, "main"):
            program = importlib.import_module(f"{module}.__main__")
        output = io.StringIO()
        errors = io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdin", io.StringIO(text))
            for name in os.environ.keys() - environment.keys():
                patch.delenv(name)
            for name, value in environment.items():
                patch.setenv(name, value)
            with redirect_stdout(output), redirect_stderr(errors):
                program.main()
        return subprocess.CompletedProcess(
            module, 0, output.getvalue(), errors.getvalue()
        )

    monkeypatch.setattr(checks_preview, "run_module", run_here)
    monkeypatch.setattr(trainer_process, "run_module", run_here)


@pytest.fixture
def unloaded_tasks(monkeypatch):
    """A check of sources that loads no tasks: test_task_check.py does."""
    monkeypatch.setattr(
        "finetune_cli.checks.sources.loading_problems", lambda *_: ([], [])
    )


@pytest.fixture
def diagnose(tmp_path, monkeypatch):
    """A function that returns the diagnostics of a manifest's text, without the file's name."""
    monkeypatch.chdir(tmp_path)

    def diagnose(text):
        file = Path("pipeline.yaml")
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return [
            str(diagnostic).removeprefix("pipeline.yaml:")
            for diagnostic in read_all(file).diagnostics
        ]

    return diagnose
