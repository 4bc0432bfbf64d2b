"""Output to a terminal or a file whose encoding lacks the signs of this program."""

import os
import subprocess
import sys

import pytest
from support.operator.scenario import Scenario

from finetune_operator.core.pipeline import Key
from finetune_operator.local.pipeline_file import PipelineFile


@pytest.fixture
def show(tmp_path):
    """A function that returns what `finetune get` of a run prints with an encoding."""
    status = Scenario().run("prepare").status
    file = PipelineFile(tmp_path)
    file.write_status(file.apply(Key("default", "demo"), Scenario().spec, {}), status)

    def show(encoding):
        command = [
            sys.executable,
            "-m",
            "finetune_cli",
            "get",
            "--workdir",
            str(tmp_path),
        ]
        environment = os.environ | {
            "PYTHONIOENCODING": encoding,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        done = subprocess.run(command, env=environment, capture_output=True, check=True)
        return done.stdout.decode(encoding).splitlines()

    return show


def test_ascii_output_has_a_letter_in_place_of_each_mark(show):
    lines = show("ascii")
    assert lines[1].startswith("v prepare   done")
    assert lines[3].startswith("o evaluate ")


def test_utf_8_output_keeps_its_marks(show):
    assert show("utf-8")[1].startswith("✔ prepare   done")
