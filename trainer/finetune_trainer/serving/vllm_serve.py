"""`vllm serve`, of the package vllm, which wants a GPU and is installed by whoever has one."""

import importlib.util
import sys
from pathlib import Path

from finetune_trainer.errors import ConfigInvalid
from finetune_trainer.serving.engine import Launch
from finetune_trainer.serving.transformers_serve import OFFLINE


def launch(model_folder: Path, host: str, port: int) -> Launch:
    """Serve a folder under its own name; raises ConfigInvalid where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigInvalid("deploy.engine: vllm is not installed here; install it, or use transformers")
    program = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_folder)]
    options = ["--host", host, "--port", str(port), "--served-model-name", model_folder.name]
    return Launch([*program, *options], model_folder.name, model_folder.parent, OFFLINE)
