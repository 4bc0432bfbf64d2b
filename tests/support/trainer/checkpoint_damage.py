"""Ways in which the folder of a checkpoint is damaged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from finetune_trainer.runtime import artifacts


def resealed(change: Callable[[Path], object]) -> Callable[[Path], object]:
    """Change a checkpoint and write a matching manifest, as a program with a bug would."""

    def damage(folder: Path) -> None:
        metadata = json.loads((folder / "manifest.json").read_text())["about"]
        change(folder)
        artifacts.seal(folder, metadata)

    return damage


def with_tensors(
    name: str, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
):
    return resealed(
        lambda folder: save_file(change(load_file(folder / name)), folder / name)
    )


def with_state(**values: object):
    def change(folder: Path) -> None:
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps(state | values))

    return resealed(change)


def with_manifest(change: Callable[[dict], object]):
    def damage(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        change(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return damage


def truncate(name: str):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-9])


def empty(name: str):
    return lambda folder: (folder / name).write_bytes(b"")


def missing(name: str):
    return lambda folder: (folder / name).unlink()


def flip(name: str):
    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)

    return damage


def replaced_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("not a folder")


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def put_folder(path: Path) -> None:
    """Replace a file by an empty folder."""
    path.unlink()
    path.mkdir()


def first_renamed(tensors):
    name = min(tensors)
    return {
        ("another." + key if key == name else key): value
        for key, value in tensors.items()
    }


def first_as(make):
    def change(tensors):
        name = min(tensors)
        return tensors | {name: make(tensors[name])}

    return change
