"""Sealed models to push to the double of the hub, and the repository that they are pushed to."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support.stores.hub_environment import sealed_model
from support.stores.hub_state import Hub, Repository

from finetune_trainer.stores.hub.target import HubTarget
from finetune_trainer.stores.port import Publication

URI = "hf://people/bot"
NAME = "people/bot"
LARGE_NAME = "b/c.safetensors"
SMALL = b"s" * 100_000
LARGE = bytes(range(256)) * 4096
CARD = b"---\nlicense: mit\n---\n# A model\n"


@dataclass
class HubModel:
    folder: Path
    digest: str
    names: list[str]

    def publish(self, **options: bool) -> Publication:
        return HubTarget(URI, **options).publish(self.folder, self.digest, self.names)

    def contents(self) -> dict[str, bytes]:
        return {
            name: (self.folder / name).read_bytes()
            for name in [*self.names, "manifest.json"]
        }

    @property
    def size(self) -> int:
        return sum(len(content) for content in self.contents().values())


def make_model(folder: Path, **more: bytes) -> HubModel:
    files = {
        "README.md": CARD,
        "a.safetensors": SMALL,
        "b/c.safetensors": LARGE,
        "config.json": b"{}",
        "empty": b"",
    }
    return HubModel(folder, *sealed_model(folder, files | more))


def repository(hub: Hub) -> Repository:
    pushed = hub.repository(NAME)
    assert pushed
    return pushed


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
