"""`transformers serve`, of the package transformers[serving]."""

import sys
from pathlib import Path

from finetune_trainer.contract import served_name
from finetune_trainer.serving.engine import Launch

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def launch(model_folder: Path, host: str, port: int) -> Launch:
    """Serve a folder under its own name, on the accelerator where there is one."""
    model = served_name(model_folder.name)
    working_folder = model_folder if model == "." else model_folder.parent
    # -P: what lies in the working folder is not imported.
    program = [sys.executable, "-P", "-m", "transformers.cli.transformers", "serve", model]
    options = ["--host", host, "--port", str(port), "--device", "auto", "--default-seed", "0"]
    return Launch([*program, *options], model, working_folder, OFFLINE)
