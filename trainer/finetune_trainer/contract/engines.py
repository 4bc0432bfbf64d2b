"""Engines: the model servers that `deploy` can start, in a container or as a child process.

To add an engine, add an entry to ENGINES. Every engine must serve GET /health, GET /v1/models, and OpenAI's
POST /v1/completions and /v1/chat/completions.
"""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

DIGEST_FOLDER = re.compile(r"sha256-[0-9a-f]{64}")
"""Name of the folder of a model in a target; beside it are earlier models and `latest`."""
# Kubernetes sends probes to the pod's address, which may be of either kind. vLLM binds it for both.
ALL_ADDRESSES = "::"
"""The host of a server that listens on all addresses of IPv4 and IPv6."""
NO_TEMPLATE = "this model has no chat template; send a text to /v1/completions"
"""Answer of the engine Transformers to a conversation with a model that only continues texts."""
# Servers read the model from disk. They must not wait for a hub that a cluster may not reach, nor report to it.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
VLLM_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}


@dataclass(frozen=True)
class LaunchSpec:
    """The command of a server, with its environment and working directory."""

    command: tuple[str, ...]
    model: str
    """The model's name in requests."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the environment."""
    working_dir: Path | None = None
    """Working directory; None for the image's working directory."""


@dataclass(frozen=True)
class Engine:
    """The ways to start a kind of model server."""

    container: Callable[[PurePosixPath, str, int], LaunchSpec]
    """Returns the launch spec in a container, given the model's folder, the listen address and the port."""
    process: Callable[[Path, str, int], LaunchSpec]
    """Returns the launch spec of a child process of the deploy stage, given the same arguments for this machine."""
    package: str
    """Python package that `process` requires."""


def model_name(location: str) -> str:
    """Return the name of a model in requests: the last part of its target, without a digest, a commit or a tag."""
    _, _, path = location.partition("://")
    parts = [part for part in (path or location).split("/") if part]
    if not parts:
        return "model"
    if len(parts) > 1 and DIGEST_FOLDER.fullmatch(parts[-1]):
        # Clients must not change their requests with each push.
        parts.pop()
    name, *_ = re.split("[@:]", parts[-1])
    return name


def served_name(folder: str) -> str:
    """Return the model's name in requests to `transformers serve`.

    The server parses a name as NAME@REVISION or NAME:FILE. A folder name that it could parse in this way is replaced by
    `.`, and the server then starts inside the folder instead of in its parent.
    """
    is_plain = re.fullmatch(r"\w[\w.-]*", folder)
    return folder if is_plain else "."


def _transformers_container(model: PurePosixPath, host: str, port: int) -> LaunchSpec:
    program = ("python", "-P", "-m", "finetune_trainer.serving", str(model))
    options = ("--host", host, "--port", str(port))
    name = served_name(model_name(str(model)))
    return LaunchSpec((*program, *options), name)


def _transformers_process(model: Path, host: str, port: int) -> LaunchSpec:
    name = served_name(model.name)
    # -P: Python must not import from the working directory, where a file of the model could shadow a library.
    program = (
        sys.executable,
        "-P",
        "-m",
        "finetune_trainer.serving.transformers_server",
        name,
    )
    options = ("--host", host, "--port", str(port))
    working_dir = model if name == "." else model.parent
    return LaunchSpec((*program, *options), name, OFFLINE, working_dir)


def _vllm_container(model: PurePosixPath, host: str, port: int) -> LaunchSpec:
    name = model_name(str(model))
    program = ("vllm", "serve", str(model), "--served-model-name", name)
    options = ("--host", host, "--port", str(port))
    return LaunchSpec((*program, *options), name, VLLM_OFFLINE)


def _vllm_process(model: Path, host: str, port: int) -> LaunchSpec:
    name = model_name(str(model))
    # -P as above. The module and not the command `vllm`, which need not be on the PATH of this interpreter.
    module = "vllm.entrypoints.openai.api_server"
    program = (sys.executable, "-P", "-m", module, "--model", str(model))
    options = ("--host", host, "--port", str(port), "--served-model-name", name)
    return LaunchSpec((*program, *options), name, OFFLINE, model.parent)


# The only list of engines: the enum of the CRD, the operator's Deployment and the local server read it (ADR 11).
ENGINES: dict[str, Engine] = {
    "Transformers": Engine(
        _transformers_container, _transformers_process, "transformers"
    ),
    "VLLM": Engine(_vllm_container, _vllm_process, "vllm"),
}
