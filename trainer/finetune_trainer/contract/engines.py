"""Engines: the model servers that `deploy` can start, in a container or as a child process.

To add an engine, add an entry to ENGINES. Every engine must serve GET /health and OpenAI's POST /v1/completions.
"""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

DIGEST_FOLDER = re.compile(r"sha256-[0-9a-f]{64}")
"""Name of the folder of one model in a target; beside it are earlier ones and `latest`."""
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
VLLM_OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class LaunchSpec:
    """The command of one server, with its environment and working directory."""

    command: tuple[str, ...]
    model: str
    """The model's name in requests."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the environment."""
    working_dir: Path | None = None
    """None: the image's working directory."""


@dataclass(frozen=True)
class Engine:
    """The ways to start one kind of model server."""

    container: Callable[[PurePosixPath, str, int], LaunchSpec]
    """Returns the launch spec in a container, given the model's folder, the listen address and the port."""
    process: Callable[[Path, str, int], LaunchSpec]
    """Returns the launch spec of a child process of the deploy stage, given the same arguments for this machine."""
    package: str
    """Python package that `process` requires."""


def model_name(location: str) -> str:
    """Return the name of a model in requests: the last part of its target, without a digest, a commit or a tag."""
    path = location.partition("://")[2] or location
    parts = [part for part in path.split("/") if part] or ["model"]
    if len(parts) > 1 and DIGEST_FOLDER.fullmatch(parts[-1]):
        parts.pop()
    return re.split("[@:]", parts[-1])[0]


def served_name(folder: str) -> str:
    """Return the model's name in requests to `transformers serve`.

    The server parses a name as NAME@REVISION or NAME:FILE. A folder name that it could parse so is replaced by `.`,
    and the server then starts inside the folder instead of in its parent.
    """
    return folder if re.fullmatch(r"\w[\w.-]*", folder) else "."


def _transformers_container(model: PurePosixPath, host: str, port: int) -> LaunchSpec:
    program = ("python", "-P", "-m", "finetune_trainer.serving", str(model))
    return LaunchSpec(
        (*program, "--host", host, "--port", str(port)), served_name(model_name(str(model)))
    )


def _transformers_process(model: Path, host: str, port: int) -> LaunchSpec:
    name = served_name(model.name)
    # -P: Python must not import from the working directory, where a file of the model could shadow a library.
    program = (sys.executable, "-P", "-m", "transformers.cli.transformers", "serve", name)
    options = ("--host", host, "--port", str(port), "--device", "auto", "--default-seed", "0")
    return LaunchSpec((*program, *options), name, OFFLINE, model if name == "." else model.parent)


def _vllm_container(model: PurePosixPath, host: str, port: int) -> LaunchSpec:
    program = ("vllm", "serve", str(model), "--served-model-name", model_name(str(model)))
    return LaunchSpec(
        (*program, "--host", host, "--port", str(port)), model_name(str(model)), VLLM_OFFLINE
    )


def _vllm_process(model: Path, host: str, port: int) -> LaunchSpec:
    program = (
        sys.executable,
        "-P",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
    )
    options = ("--host", host, "--port", str(port), "--served-model-name", model_name(str(model)))
    return LaunchSpec((*program, *options), model_name(str(model)), OFFLINE, model.parent)


ENGINES: dict[str, Engine] = {
    "Transformers": Engine(_transformers_container, _transformers_process, "transformers"),
    "VLLM": Engine(_vllm_container, _vllm_process, "vllm"),
}
