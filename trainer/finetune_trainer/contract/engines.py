"""Model servers that deploy can start: an engine is one entry of ENGINES, for a container and for a process.

Every engine answers GET /health and POST /v1/completions as OpenAI's API does.
"""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
VLLM_OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class LaunchSpec:
    """The command of one server and what it needs around it."""

    command: tuple[str, ...]
    model: str
    """The model's name in requests."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment."""
    working_dir: Path | None = None
    """None: wherever the container starts."""


@dataclass(frozen=True)
class Engine:
    """How one kind of model server is started."""

    container: Callable[[PurePosixPath, str, int], LaunchSpec]
    """In a container of its image, from the model's folder there, the address to listen on and the port."""
    process: Callable[[Path, str, int], LaunchSpec]
    """As a child of the deploy stage, from the same three on this machine."""
    package: str
    """The Python package that `process` needs."""


def served_name(folder: str) -> str:
    """Return the model's name in requests to `transformers serve`, which is started beside or in its folder.

    It reads NAME@REVISION and NAME:FILE into what it is given; a dot has neither.
    """
    return folder if re.fullmatch(r"\w[\w.-]*", folder) else "."


def _transformers_container(model: PurePosixPath, host: str, port: int) -> LaunchSpec:
    program = ("python", "-P", "-m", "finetune_trainer.serving", str(model))
    return LaunchSpec((*program, "--host", host, "--port", str(port)), served_name(model.name))


def _transformers_process(model: Path, host: str, port: int) -> LaunchSpec:
    name = served_name(model.name)
    # -P: Python does not import from the working directory, so that no file of the model takes a library's place.
    program = (sys.executable, "-P", "-m", "transformers.cli.transformers", "serve", name)
    options = ("--host", host, "--port", str(port), "--device", "auto", "--default-seed", "0")
    return LaunchSpec((*program, *options), name, OFFLINE, model if name == "." else model.parent)


def _vllm_container(model: PurePosixPath, host: str, port: int) -> LaunchSpec:
    program = ("vllm", "serve", str(model), "--served-model-name", model.name)
    return LaunchSpec((*program, "--host", host, "--port", str(port)), model.name, VLLM_OFFLINE)


def _vllm_process(model: Path, host: str, port: int) -> LaunchSpec:
    program = (sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model))
    options = ("--host", host, "--port", str(port), "--served-model-name", model.name)
    return LaunchSpec((*program, *options), model.name, OFFLINE, model.parent)


ENGINES: dict[str, Engine] = {
    "transformers": Engine(_transformers_container, _transformers_process, "transformers"),
    "vllm": Engine(_vllm_container, _vllm_process, "vllm"),
}
