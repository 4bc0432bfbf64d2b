"""`transformers serve`, of the package transformers[serving]."""

import re
import sys
from pathlib import Path

from finetune_trainer.serving.engine import Launch

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def launch(model_folder: Path, port: int) -> Launch:
    """Serve a folder under its own name, on the accelerator where there is one."""
    # The server reads NAME@REVISION and NAME:FILE into what it is told; a dot has neither.
    plain = re.fullmatch(r"\w[\w.-]*", model_folder.name)
    model, working_folder = (model_folder.name, model_folder.parent) if plain else (".", model_folder)
    # -P: what lies in the working folder is not imported.
    program = [sys.executable, "-P", "-m", "transformers.cli.transformers", "serve", model]
    options = ["--host", "127.0.0.1", "--port", str(port), "--device", "auto", "--default-seed", "0"]
    return Launch([*program, *options], model, working_folder, OFFLINE)
