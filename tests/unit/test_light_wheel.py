"""The wheel without extras on every Python that it is for: its commands need no package but its own four."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSIONS = ("3.11", "3.12", "3.13")
SMALL = "model: {uri: hf://a/b}, datasets: [{uri: hf://c/d}]"
MANIFEST = f"""\
apiVersion: finetune.dev/v1alpha1
kind: FineTunePipeline
metadata: {{name: small}}
spec: {{{SMALL}}}
"""
COMMANDS = (
    ("version",),
    ("validate", "p.yaml"),
    ("explain", "DataInvalid"),
    ("explain", "train.lora"),
    ("schema",),
    ("completion", "bash"),
)
pytestmark = pytest.mark.skipif(
    os.environ.get("TRAINING") != "all",
    reason="TRAINING=all runs it: it installs packages with pip for each Python",
)


def interpreter(version):
    """Return the path of a Python of this version that starts, or None."""
    if version == ".".join(map(str, sys.version_info[:2])):
        return sys.executable
    program = shutil.which(f"python{version}")
    # A shim of pyenv is there, and starts no Python, if the version is not chosen.
    if program and subprocess.run([program, "-V"], check=False).returncode == 0:
        return program
    return None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*build, "--wheel-dir", folder, ROOT], check=True)
    [file] = folder.glob("*.whl")
    return file


@pytest.mark.parametrize("version", VERSIONS)
def test_commands_work_without_extras(version, wheel, tmp_path):
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no python{version} on PATH")
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True)
    programs = tmp_path / "venv" / "bin"
    subprocess.run([programs / "pip", "install", "--quiet", wheel], check=True)
    (tmp_path / "p.yaml").write_text(MANIFEST)
    # The packages of the tests must not be found.
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command in COMMANDS:
        done = subprocess.run(
            [programs / "finetune", *command],
            cwd=tmp_path,
            env=own,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), command
        assert done.stdout
    listed = subprocess.run(
        [programs / "pip", "list"], capture_output=True, text=True, check=True
    )
    assert not re.search(r"^(torch|kubernetes|kopf) ", listed.stdout, re.MULTILINE)
