"""The environment in which the hub's library finds the double and nothing else; models to publish."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants
from support.stores.hub_server import serve_hub
from support.stores.hub_state import Hub

from finetune_trainer.publishing.published_model import describe
from finetune_trainer.runtime.artifacts import files_in, seal

TOKEN = "hf_writer"


def use_hub(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, token: str | None = TOKEN
) -> None:
    """Set what the library reads from the environment; a part of it was read when it was imported."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(hub.folder / "no-token"))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    set_token(monkeypatch, token)


@contextmanager
def hub_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *organisations: str
) -> Iterator[Hub]:
    """Serve a double in which ann may write to these organisations, and let the hub's library use it."""
    hub = Hub(folder)
    hub.add_token(TOKEN, "ann", organisations)
    with serve_hub(hub):
        use_hub(hub, monkeypatch)
        yield hub


def set_token(monkeypatch: pytest.MonkeyPatch, token: str | None) -> None:
    if token is None:
        monkeypatch.delenv("HF_TOKEN", raising=False)
    else:
        monkeypatch.setenv("HF_TOKEN", token)


def process_environment(hub: Hub) -> dict[str, str]:
    """Return the environment of a process that uses the double."""
    hub_variables = {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    path = os.pathsep.join(
        [
            *os.environ.get("PYTHONPATH", "").split(os.pathsep),
            "operator",
            "trainer",
            "tests",
            ".",
        ]
    )
    return os.environ | hub_variables | {"PYTHONPATH": path}


def sealed_model(folder: Path, files: dict[str, bytes]) -> tuple[str, list[str]]:
    """Write and seal a model as a push does; return its digest and the names of its files."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    seal(folder, {"stage": "push", "identity": folder.name})
    return describe(folder).digest, [
        path.relative_to(folder).as_posix() for path in files_in(folder)
    ]


def model_files(folder: Path) -> dict[str, bytes]:
    """Return a model's files, and files in other formats that no stage needs."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return files | {
        "pytorch_model.bin": b"pickle",
        "original/consolidated.00.pth": b"pickle",
        "onnx/model.onnx": b"x",
    }
