"""A user without a home: no HOME, and no entry in /etc/passwd, as in a container with a uid of its own."""

import os
import subprocess
import sys

import pytest

from finetune_cli.__main__ import main
from finetune_cli.arguments import claims
from finetune_cli.diagnostics import UsageError

# The test itself may run as a user with an entry.
PROGRAM = """
import pwd, sys
def unknown(uid):
    raise KeyError(uid)
pwd.getpwuid = unknown
from finetune_cli.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def finetune(folder, *arguments):
    """Run a command in a process of such a user."""
    without = {"HOME", "KUBECONFIG"}
    variables = {
        name: value for name, value in os.environ.items() if name not in without
    }
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )


def test_kubeconfig_of_no_home_is_no_kubeconfig(tmp_path):
    ended = finetune(tmp_path, "get", "demo", "-n", "team")
    assert ended.returncode == 2
    assert "no kubeconfig at /.kube/config: set KUBECONFIG" in ended.stderr


def test_commands_without_a_cluster_need_no_home(tmp_path):
    sources = ("--model", "hf://org/base", "--data", "hf://org/data")
    for arguments in (("init", *sources), ("validate", "pipeline.yaml"), ("list",)):
        ended = finetune(tmp_path, *arguments)
        assert (ended.returncode, ended.stderr) == (0, ""), arguments


@pytest.mark.parametrize("option", ["--model", "--data"])
def test_source_in_the_home_of_no_user_is_refused(
    tmp_path, monkeypatch, capsys, option
):
    monkeypatch.chdir(tmp_path)
    sources = {"--model": "hf://org/base", "--data": "hf://org/data"}
    sources[option] = "~no-user-here/file"
    arguments = [word for pair in sources.items() for word in pair]
    assert main(["init", *arguments]) == 2
    assert "~no-user-here is no user of this machine" in capsys.readouterr().err


def test_claim_in_the_home_of_no_user_is_refused():
    with pytest.raises(UsageError, match="no user of this machine: write the whole"):
        claims(["demo=~no-user-here/claim"])
