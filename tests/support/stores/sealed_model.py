"""Sealed folders that stand for models, and processes that publish them."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from finetune_trainer.runtime.artifacts import MANIFEST, files_in, seal

FILES = {
    "config.json": 40,
    "model-1.safetensors": 300_000,
    "model-2.safetensors": 200_000,
    "empty": 0,
    "a/b.txt": 513,
}
"""Size in bytes of each file."""

PUBLISH = """
import sys
from pathlib import Path
from finetune_trainer.stop_signal import stop
stop.install()
from finetune_trainer.stores.oci.store import RegistryTarget
uri, folder, digest, *names = sys.argv[1:]
publication = RegistryTarget(uri).publish(Path(folder), digest, names)
print(publication.uri, publication.sent_bytes)
"""


@dataclass(frozen=True)
class SealedModel:
    """A sealed folder and its digest."""

    folder: Path
    digest: str

    @property
    def names(self) -> list[str]:
        return [
            path.relative_to(self.folder).as_posix() for path in files_in(self.folder)
        ]

    @property
    def contents(self) -> dict[str, bytes]:
        """All files with the manifest, by name."""
        return {
            name: (self.folder / name).read_bytes() for name in [*self.names, MANIFEST]
        }

    @property
    def size(self) -> int:
        return sum(map(len, self.contents.values()))


def make_model(folder: Path, seed: int = 0) -> SealedModel:
    """Write a model whose bytes follow from the seed."""
    for number, (name, size) in enumerate(FILES.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        unit = bytes((seed + number + index * index) % 256 for index in range(257))
        path.write_bytes((unit * (size // len(unit) + 1))[:size])
    return SealedModel(folder, seal(folder, {"stage": "push"}))


def start_publish(uri: str, model: SealedModel) -> subprocess.Popen[str]:
    """Start a process that publishes a model; it prints the URI and the bytes that it sent."""
    return start(PUBLISH, uri, str(model.folder), model.digest, *model.names)


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a Python process with the modules of this one."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
