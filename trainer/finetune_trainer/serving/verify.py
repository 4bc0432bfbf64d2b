"""Verify a pushed model: `python -m finetune_trainer.serving.verify MODEL_DIR [--digest sha256:…]`."""

import argparse
import sys
from pathlib import Path

from finetune_trainer.publishing.published_model import model_digest
from finetune_trainer.runtime.artifacts import MANIFEST, CorruptArtifact, verify
from finetune_trainer.runtime.errors import SourceNotFound


def verify_model(model: Path, expected: str | None) -> str | None:
    """Read every byte of a pushed model and return its digest, or None if it has no manifest.

    A model without a manifest is from a custom push program. Raise SourceNotFound if the model is missing or corrupt,
    or if its digest is not the expected one.
    """
    if not model.is_dir():
        raise SourceNotFound(f"{model} does not exist; run push again")
    if not (model / MANIFEST).exists():
        print(f"{model} has no {MANIFEST}, so it is served unverified", flush=True)
        return None
    try:
        verify(model)
    except CorruptArtifact as error:
        raise SourceNotFound(f"{model}: the pushed model is corrupt: {error}; run push again") from error
    digest = model_digest(model)
    if expected and expected != digest:
        raise SourceNotFound(f"{model} has the digest {digest}, push published {expected}; run push again")
    return digest


def main(arguments: list[str]) -> int:
    """Verify a model and return the exit code: 0, or 66 if the model is missing, corrupt or a different one."""
    parser = argparse.ArgumentParser(prog="python -m finetune_trainer.serving.verify", description=__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="folder of the pushed model")
    parser.add_argument("--digest", help="expected digest, from the result of push")
    options = parser.parse_args(arguments)
    try:
        verify_model(options.model, options.digest)
    except SourceNotFound as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
