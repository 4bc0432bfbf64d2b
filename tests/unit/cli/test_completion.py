"""Completion, as bash runs it: the printed script is read by a real shell, which completes a command line."""

import shlex
import subprocess

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
    assert complete("logs", "docstrings", "ev") == ["evaluate"]


def test_unknown_command_completes_files_only(complete):
    assert complete("trian", "do") == ["done.yaml"]


def test_scripts_name_both_programs(capsys):
    for shell in ("bash", "zsh"):
        assert main(["completion", shell]) == 0
        assert "_finetune finetune kubectl-finetune" in capsys.readouterr().out
