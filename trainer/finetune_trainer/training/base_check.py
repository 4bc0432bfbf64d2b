"""Looks at a base model on this machine: `python -m finetune_trainer.training.base_check`.

Reads {"uri": URI, "folder": PATH} as JSON from stdin. Writes {"problem": why it cannot be trained or null, "packs":
whether documents of a packed row stay apart} to stdout.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

from finetune_trainer.models.isolation import check_packing
from finetune_trainer.models.requirements import ModelFiles, check_headers, check_model
from finetune_trainer.models.structure import check_stored_weights, load_structure
from finetune_trainer.runtime.errors import ConfigInvalid


def main() -> None:
    """Answer the request of stdin."""
    request = json.load(sys.stdin)
    uri = request["uri"]
    # Libraries print what they notice, and stdout is for the answer.
    with contextlib.redirect_stdout(io.StringIO()):
        problem, packs = _look(uri, Path(request["folder"]))
    print(json.dumps({"problem": problem, "packs": packs}))


def _look(uri: str, folder: Path) -> tuple[str | None, bool]:
    files = ModelFiles.in_folder(uri, folder)
    try:
        check_model(files)
        check_headers(files)
        structure = load_structure(folder, uri)
        check_stored_weights(folder, uri, structure)
    except ConfigInvalid as error:
        return str(error), True
    try:
        check_packing(structure, uri)
    except ConfigInvalid:
        return None, False
    return None, True


if __name__ == "__main__":
    main()
