"""Model servers: how the container of each engine is started. An engine is one function and one line in ENGINES."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from finetune_trainer.contract import served_name

PORT = 8000
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class Launch:
    """How a container is started that answers on PORT: GET /health, and POST /v1/completions as OpenAI does."""

    command: tuple[str, ...]
    model: str
    """The model's name in requests."""
    env: dict[str, str] = field(default_factory=dict)


Engine = Callable[[PurePosixPath], Launch]
"""From the model's folder in the container."""


def transformers(model: PurePosixPath) -> Launch:
    """Serve on the accelerator where there is one, else on processors."""
    program = ("python", "-P", "-m", "finetune_trainer.serving", str(model))
    return Launch((*program, "--host", "0.0.0.0", "--port", str(PORT)), served_name(model.name))  # noqa: S104  a pod's own


def vllm(model: PurePosixPath) -> Launch:
    """Serve under the folder's name; more is told to it by deploy.args."""
    program = ("vllm", "serve", str(model), "--served-model-name", model.name)
    return Launch((*program, "--host", "0.0.0.0", "--port", str(PORT)), model.name, OFFLINE)  # noqa: S104  a pod's own


ENGINES: dict[str, Engine] = {
    "transformers": transformers,
    "vllm": vllm,
}
