"""Completion, as bash runs it: the printed script is read by a real shell, which completes a command line."""

import shlex
import subprocess
import sys

import pytest
from support.cli.installed_command import install

from finetune_cli.__main__ import COMMANDS, main

COMPLETE = """\
eval "$(finetune completion bash)"
COMP_WORDS=(finetune {words})
COMP_CWORD={index}
$(complete -p finetune | sed 's/.*-F \\([^ ]*\\).*/\\1/') finetune
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def complete(tmp_path):
    """A function that returns what bash would offer for the last of these words, in a folder with two runs."""
    here, environment = install(tmp_path)

    def complete(*words):
        script = COMPLETE.format(words=shlex.join(words), index=len(words))
        command = ["bash", "--norc", "-c", script]
        done = subprocess.run(
            command,
            cwd=here,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        return done.stdout.split()

    return complete


def test_commands_are_completed(complete):
    assert complete("re") == ["resume", "retry"]
    assert {*COMMANDS} <= {*complete("")}


def test_names_of_local_runs_and_files_are_completed(complete):
    assert complete("get", "d") == ["docstrings", "done.yaml"]
    assert complete("run", "")[:2] == ["docstrings", "tickets"]
    assert complete("validate", "do") == ["done.yaml"]  # it takes files only


def test_options_and_their_choices_are_completed(complete):
    assert complete("run", "--ke") == ["--keep-serving"]
    assert complete("run", "--until", "p") == ["prepare", "push"]
    assert complete("run", "--until", "d") == ["deploy"]  # and not done.yaml
    assert {"--until", "--set"} <= {*complete("run", "--")}
    assert complete("init", "--model", "do") == ["done.yaml"]
    assert complete("logs", "docstrings", "ev") == ["evaluate"]


def test_unknown_command_completes_files_only(complete):
    assert complete("trian", "do") == ["done.yaml"]


def test_scripts_name_both_programs(capsys):
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        output = capsys.readouterr().out
        assert "finetune" in output
        assert "kubectl-finetune" in output


def test_completion_imports_no_command(tmp_path):
    # A shell waits for each completion: the models alone take half a second to import.
    program = (
        "import sys; from finetune_cli.__main__ import main;"
        "main(['completion', 'bash', '--words=get\\n']);"
        "sys.exit('pydantic' in sys.modules or 'rich' in sys.modules)"
    )
    here, environment = install(tmp_path)
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=here, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout.split() == ["docstrings", "tickets", ":files"]
