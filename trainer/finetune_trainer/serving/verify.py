"""`python -m finetune_trainer.serving.verify MODEL_DIR [--digest sha256:…]`: 0 where every byte is as it was pushed."""

import argparse
import sys
from pathlib import Path

from finetune_trainer.publishing.published_model import model_digest
from finetune_trainer.runtime.artifacts import MANIFEST, CorruptArtifact, verify
from finetune_trainer.runtime.errors import SourceNotFound


def verified(model: Path, pushed: str | None) -> str | None:
    """Give the model's digest, None where another program than ours pushed it; raise SourceNotFound if it is not it."""
    if not model.is_dir():
        raise SourceNotFound(f"{model}: there is no model; run push again")
    if not (model / MANIFEST).exists():
        print(f"{model} is not sealed, so it is served unverified", flush=True)
        return None
    try:
        verify(model)
    except CorruptArtifact as damage:
        raise SourceNotFound(f"{model}: the pushed model is damaged: {damage}; run push again") from damage
    digest = model_digest(model)
    if pushed and pushed != digest:
        raise SourceNotFound(f"{model}: holds another model than the one that was pushed, {pushed}; push again")
    return digest


def main(arguments: list[str]) -> int:
    """Give the exit code: 0, or 66 where it is not the model."""
    parser = argparse.ArgumentParser(prog="python -m finetune_trainer.serving.verify", description=__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--digest", help="what push said of it")
    chosen = parser.parse_args(arguments)
    try:
        verified(chosen.model, chosen.digest)
    except SourceNotFound as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
