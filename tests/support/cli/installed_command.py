"""The command `finetune` in a folder with runs, as a shell finds it."""

import os
import shlex
import sys
from pathlib import Path

from support.operator.scenario import Scenario

from finetune_operator.core.pipeline import Key
from finetune_operator.local.pipeline_file import PipelineFile


def install(folder: Path) -> tuple[Path, dict[str, str]]:
    """Create a folder with two runs and a file; return it, and the environment in which `finetune` is found."""
    program = folder / "bin/finetune"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m finetune_cli "$@"\n'
    )
    program.chmod(0o755)
    here = folder / "here"
    for name in ("docstrings", "tickets"):
        PipelineFile(here / ".finetune" / name).apply(
            Key("default", name), Scenario().spec, {}
        )
    (here / "done.yaml").touch()
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    return here, os.environ | {
        "PATH": path,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
