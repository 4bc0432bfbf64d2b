"""Stage push: merges the adapter into its base model and publishes the merged model as one atomic folder."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from transformers import AutoTokenizer
from transformers.utils import GENERATION_CONFIG_NAME

from finetune_trainer.contract import Environment, PrepareResult, PushConfig, PushResult
from finetune_trainer.data.chat import end_tokens, template_of
from finetune_trainer.models.base_model import BaseModel, open_base_model
from finetune_trainer.models.loading import DTYPES, open_adapter
from finetune_trainer.models.merge import merged_size, save_merged
from finetune_trainer.publishing.generation_config import generation_config
from finetune_trainer.publishing.model_card import card
from finetune_trainer.publishing.published_model import CARD, PublishedModel, describe, read_published
from finetune_trainer.runtime.artifacts import (
    MANIFEST,
    atomic_folder,
    complete_replacement,
    digest_of,
    files_in,
    read_unreplaced,
    seal,
)
from finetune_trainer.runtime.errors import ConfigInvalid, ServiceUnavailable
from finetune_trainer.runtime.sources import locate
from finetune_trainer.runtime.stage_folder import Context, read_result

FILE_MODE = 0o644
"""safetensors writes files that only the owner can read, but the model server may run as another user."""


@dataclass(frozen=True)
class Source:
    """The adapter to publish, and its base model."""

    base: BaseModel
    adapter: Path
    about: dict[str, object]
    """What the manifest says of the published model."""


class Unchanged(Exception):
    """The target already contains the same model."""

    def __init__(self, published: PublishedModel) -> None:
        super().__init__()
        self.published = published


def run(config: PushConfig, context: Context) -> PushResult:
    """Run the stage. Raise ConfigInvalid, SourceNotFound or ServiceUnavailable; the target is then unchanged."""
    target = resolve_target(config.recipe.target, context.environment)
    base = open_base_model(config.model, context.environment)
    adapter = open_adapter(context.environment, config.train, base)
    source = Source(base, adapter, {"stage": "push", "identity": config.identity, "adapter": digest_of(adapter)})
    published = read_published(target)
    is_published = published is not None and published.about == source.about
    if published is None or not is_published:
        try:
            published = publish(config, context, source, target)
        except Unchanged as unchanged:
            published, is_published = unchanged.published, True
    if is_published:
        print(f"push: {config.recipe.target} already contains this model; nothing was written", flush=True)
    # Not of the target: another push may have replaced it by now.
    return PushResult(identity=config.identity, digest=published.digest, uri=config.recipe.target, size=published.size)


def is_output_valid(result: PushResult, config: PushConfig, environment: Environment) -> bool:
    """Return whether the target contains the model of the result; read every byte of it."""
    published = read_published(resolve_target(config.recipe.target, environment))
    return published is not None and published.digest == result.digest


def resolve_target(uri: str, environment: Environment) -> Path:
    """Return the folder to publish to; raise ConfigInvalid if it contains files that no push wrote."""
    if uri.startswith("pvc://") and not uri.removeprefix("pvc://").partition("/")[2].strip("/"):
        raise ConfigInvalid(f"push.target {uri}: the root of a claim cannot be replaced; use pvc://CLAIM/PATH")
    target = locate(uri, environment).resolve()
    complete_replacement(target)
    read_unreplaced(target, lambda: _check_was_pushed(target, uri))
    return target


def _check_was_pushed(target: Path, uri: str) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    try:
        manifest = json.loads((target / MANIFEST).read_bytes())
        is_pushed = manifest["about"]["stage"] == "push"
        unexpected = {path.relative_to(target).as_posix() for path in files_in(target)} - set(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        is_pushed, unexpected = False, set()
    if not is_pushed:
        raise ConfigInvalid(
            f"push.target {uri}: {target} exists and was not written by a push; move it or choose another target"
        )
    if unexpected:
        raise ConfigInvalid(f"push.target {uri}: {target / min(unexpected)} was not written by a push; move it")


def publish(config: PushConfig, context: Context, source: Source, target: Path) -> PublishedModel:
    """Merge the model, write it to a temporary folder, rename that to the target, and return what was published.

    Raise Unchanged, and write nothing, if the target already contains the same model.
    """
    progress, environment = context.progress, context.environment
    progress.update(step=0, total=2, note="merging")
    dtype = DTYPES[config.recipe.dtype]
    with (
        _check_disk_space(merged_size(source.base.folder, dtype), target, config.recipe.target),
        atomic_folder(target, shared=True) as folder,
    ):
        save_merged(source.base.folder, source.adapter, dtype, folder)
        progress.update(step=1, note="writing")
        save_tokenizer(config, environment, source.base.folder, folder)
        (folder / CARD).write_text(card(config, environment, target.name))
        for path in files_in(folder):
            path.chmod(FILE_MODE)
        seal(folder, source.about)
        published, existing = describe(folder), read_published(target)
        if existing is not None and existing.digest == published.digest:
            raise Unchanged(existing)
    progress.update(step=2, note="published")
    return published


def save_tokenizer(config: PushConfig, environment: Environment, base: Path, folder: Path) -> None:
    """Write the tokenizer with the chat template used in training, and the tokens at which generation ends."""
    tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
    prepared = read_result(environment.stage_dir("prepare", config.prepare))
    conversations = isinstance(prepared, PrepareResult) and prepared.conversations
    if conversations:
        tokenizer.chat_template = template_of(tokenizer)  # a default one if the base model has none
    tokenizer.save_pretrained(folder)
    generation = generation_config(base, end_tokens(tokenizer, conversations=conversations))
    (folder / GENERATION_CONFIG_NAME).write_text(json.dumps(generation, indent=2, sort_keys=True) + "\n")


@contextmanager
def _check_disk_space(needed: int, target: Path, uri: str) -> Iterator[None]:
    """Raise ServiceUnavailable if the disk has too little free space, or if a write in the block fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise ServiceUnavailable(
            f"push.target {uri}: the model needs {needed:,} more bytes and {free:,} are free; "
            "free some space and retry; the target is unchanged"
        )
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ServiceUnavailable(
            f"push.target {uri}: cannot write: {error}; free some space and retry; the target is unchanged"
        ) from error
