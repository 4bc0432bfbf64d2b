"""Verify a pushed model: `python -m finetune_trainer.serving.verify MODEL_DIR [--digest sha256:…] [--fetch URI]`."""

import argparse
import shutil
import sys
from pathlib import Path

from finetune_trainer.contract.engines import DIGEST_FOLDER
from finetune_trainer.publishing.published_model import read_intact
from finetune_trainer.runtime.artifacts import (
    MANIFEST,
    CorruptArtifact,
    is_present,
    read_unreplaced,
)
from finetune_trainer.runtime.errors import ConfigInvalid, SourceNotFound, StageError

DOWNLOAD = ".download"
"""Folder in the model's folder for an unfinished download."""


def verify_model(model: Path, expected: str | None) -> str | None:
    """Read every byte of a pushed model and return its digest, or None if it has no manifest.

    A model without a manifest is from a custom push program, unless its folder has the name of a digest. Raise
    SourceNotFound if the model is missing or corrupt, or if it does not have the expected digest. If another push
    replaces the model meanwhile, read the new model.
    """
    if not is_present(model):
        raise SourceNotFound(f"{model} does not exist; run push again")
    try:
        return read_unreplaced(model, lambda: _verify(model, expected))
    except _Unsealed:
        # Only the trainer's own push names a folder by a digest, and it always writes a manifest.
        if expected and DIGEST_FOLDER.fullmatch(model.name):
            raise SourceNotFound(f"{model} has no {MANIFEST}; run push again") from None
        print(f"{model} has no {MANIFEST}, so it is served unverified", flush=True)
        return None


class _Unsealed(CorruptArtifact):
    """The model has no manifest. An exception, so that `read_unreplaced` looks again if it was being replaced."""


def _verify(model: Path, expected: str | None) -> str:
    if not (model / MANIFEST).exists():
        raise _Unsealed
    try:
        digest = read_intact(model).digest
    except CorruptArtifact as error:
        raise SourceNotFound(
            f"{model}: the pushed model is corrupt: {error}; run push again"
        ) from error
    if expected and expected != digest:
        raise SourceNotFound(
            f"{model} has the digest {digest}, push published {expected}; run push again"
        )
    return digest


def fetch_model_to(folder: Path, uri: str) -> None:
    """Download a pushed model to a folder of its own. Raise like `stores.download.fetch`."""
    from finetune_trainer.stores.download import fetch  # noqa: PLC0415  most servers mount their model
    from finetune_trainer.stores.schemes import open_source  # noqa: PLC0415

    source = open_source(uri, "model")
    if source is None:
        raise ConfigInvalid(
            f"{uri} is a path: mount its volume instead of downloading it"
        )
    if (folder / MANIFEST).exists():
        # The container was restarted after a complete download, since the manifest is moved last.
        return
    download = folder / DOWNLOAD
    model, _ = fetch(source, None, download)
    paths = sorted(model.iterdir(), key=lambda path: path.name == MANIFEST)
    for path in paths:
        path.rename(folder / path.name)
    shutil.rmtree(download)


def main(arguments: list[str]) -> int:
    """Verify a model and return the exit code: 0, or 66 if the model is missing, corrupt or another model.

    69 if a process was killed while it replaced the model: the next push completes the replacement.
    """
    parser = argparse.ArgumentParser(
        prog="python -m finetune_trainer.serving.verify", description=__doc__
    )
    parser.add_argument(
        "model", type=Path, metavar="MODEL_DIR", help="folder of the pushed model"
    )
    parser.add_argument("--digest", help="expected digest, from the result of push")
    parser.add_argument(
        "--fetch", metavar="URI", help="download the model to the folder first"
    )
    options = parser.parse_args(arguments)
    try:
        if options.fetch:
            fetch_model_to(options.model, options.fetch)
        verify_model(options.model, options.digest)
    except StageError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
