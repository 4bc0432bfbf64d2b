"""Looks at a base model and a recipe before a pipeline starts: `python -m finetune_trainer.training.check`.

Reads a `Request` as JSON from stdin. Writes a JSON object a line to stdout for each `Finding`. Reads no weights.
"""

import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from finetune_trainer.contract import TrainRecipe
from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.models.loading import check_context_length
from finetune_trainer.models.positions import embeddings_of
from finetune_trainer.models.requirements import (
    CONFIG,
    ModelFiles,
    check_headers,
    check_model,
)
from finetune_trainer.models.structure import check_stored_weights, load_structure
from finetune_trainer.models.tokenizer import (
    load_tokenizer,
    tokens_beyond,
    too_few_embeddings,
)
from finetune_trainer.runtime.errors import ConfigInvalid, SourceNotFound, StageError
from finetune_trainer.stores.schemes import open_source
from finetune_trainer.training.requirements import (
    check_layers,
    names_layers,
    unquantized_experts,
)

MODEL = "model.uri"
REMOTE_FILES = (CONFIG, SAFE_WEIGHTS_INDEX_NAME)
"""Files of a model in a store that are read: without tokenizer and weights, which are large."""
# The index of the largest models has 9 MB.
MOST_BYTES = 16 << 20
"""Largest file that is downloaded."""
GIB = 1 << 30


@dataclass(frozen=True)
class Request:
    """What to look at."""

    uri: str
    """The base model's URI in the manifest."""
    folder: str | None
    """Its folder; None for a model in a store."""
    revision: str | None
    context_length: int
    recipe: dict[str, Any] | None
    """The recipe of the training; None if a program of the user trains."""


@dataclass(frozen=True)
class Finding:
    """A setting that cannot work, or a note about it."""

    field: str
    """Path of the field below spec."""
    message: str
    is_note: bool = False


def look_at(request: Request) -> Iterator[Finding]:
    """Yield what is wrong with a base model and with the settings that depend on it."""
    try:
        with model_files(request) as files:
            yield from _look_at_model(request, files)
    except ConfigInvalid as error:
        yield Finding(MODEL, _without_uri(error, request.uri))
    except StageError:
        # The check of stores reports a model that cannot be read.
        return


@contextmanager
def model_files(request: Request) -> Iterator[ModelFiles]:
    """Yield the files of a model; of a model in a store, the small files are downloaded."""
    if request.folder is not None:
        yield ModelFiles.in_folder(request.uri, Path(request.folder))
        return
    source = open_source(request.uri, "model", revision=request.revision)
    if source is None:
        raise SourceNotFound(f"{request.uri} is on no store")
    listed = {file.name: file for file in source.list_files(None).files}
    with tempfile.TemporaryDirectory() as folder:
        for name in REMOTE_FILES:
            file = listed.get(name)
            if file is not None and (file.size or 0) <= MOST_BYTES:
                source.download(file, Path(folder) / name)
        yield ModelFiles(request.uri, Path(folder), set(listed))


def _look_at_model(request: Request, files: ModelFiles) -> Iterator[Finding]:
    check_model(files)
    is_here = request.folder is not None
    if is_here:
        check_headers(files)
    structure = load_structure(files.folder, request.uri)
    if is_here:
        check_stored_weights(files.folder, request.uri, structure)
        yield from _token_findings(files, structure)
    base = BaseModel(request.uri, files.folder, "")
    try:
        check_context_length(base, request.context_length)
    except ConfigInvalid as error:
        yield Finding("prepare.contextLength", _without_uri(error, request.uri))
    if request.recipe is not None:
        recipe = TrainRecipe.model_validate(request.recipe)
        yield from _recipe_findings(recipe, files, structure)


def _token_findings(files: ModelFiles, structure: Any) -> Iterator[Finding]:
    """Yield a note about tokens that must not occur."""
    tokenizer = load_tokenizer(files.uri, files.folder)
    count = embeddings_of(structure.config.to_dict())
    if count is not None and tokens_beyond(tokenizer, count):
        text = too_few_embeddings(tokenizer, count)
        message = f"{text}: prepare refuses a record with such a token"
        yield Finding(MODEL, message, is_note=True)


def _recipe_findings(
    recipe: TrainRecipe, files: ModelFiles, structure: Any
) -> Iterator[Finding]:
    if names_layers(recipe):
        try:
            check_layers(files.folder, files.uri, recipe.adapter, structure)
        except ConfigInvalid as error:
            field, _, message = str(error).partition(": ")
            yield Finding(field, message)
    experts = unquantized_experts(recipe, structure)
    if experts:
        message = f"quantizes linear layers only: the experts of this model stay in 16 bits, {experts / GIB:,.1f} GiB"
        yield Finding("train.method", message, is_note=True)


def _without_uri(error: ConfigInvalid, uri: str) -> str:
    # The finding has the field, whose value is the URI.
    message = str(error).removeprefix(f"{uri}: ")
    return message.replace(f"model {uri}", "the model", 1)


def main() -> None:
    """Look at what stdin requests."""
    request = Request(**json.load(sys.stdin))
    for finding in look_at(request):
        print(json.dumps(dataclasses.asdict(finding)), flush=True)


if __name__ == "__main__":
    main()
