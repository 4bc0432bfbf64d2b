"""Stage push: merges the adapter into its base model and publishes the merged model as one atomic folder."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoTokenizer

from finetune_trainer.contract import Environment, PrepareResult, PushConfig, PushResult
from finetune_trainer.data.chat import template_of
from finetune_trainer.models.loading import DTYPES, adapter_folder
from finetune_trainer.models.merge import merge_adapter
from finetune_trainer.publishing.model_card import card
from finetune_trainer.publishing.published_model import CARD, metadata, model_digest
from finetune_trainer.runtime.artifacts import MANIFEST, atomic_folder, digest_of, files_in, seal
from finetune_trainer.runtime.errors import ConfigInvalid, ServiceUnavailable
from finetune_trainer.runtime.sources import fetch_model, locate
from finetune_trainer.runtime.stage_folder import Context, read_result

SHARD = "5GB"
"""Maximum size of one safetensors file."""
FILE_MODE = 0o644
"""safetensors writes files that only the owner can read, but the model server may run as another user."""


class Unchanged(Exception):
    """The target already contains the same model."""


def run(config: PushConfig, context: Context) -> PushResult:
    """Run the stage. Raise ConfigInvalid, SourceNotFound or ServiceUnavailable; the target is then unchanged."""
    target = resolve_target(config.recipe.target, context.environment)
    adapter = adapter_folder(context.environment, config.train)
    about: dict[str, object] = {"stage": "push", "identity": config.identity, "adapter": digest_of(adapter)}
    is_published = metadata(target) == about
    if not is_published:
        try:
            publish(config, context, adapter, target, about)
        except Unchanged:
            is_published = True
    if is_published:
        print(f"push: {config.recipe.target} already contains this model; nothing was written", flush=True)
    size = sum(path.stat().st_size for path in files_in(target))
    return PushResult(identity=config.identity, digest=model_digest(target), uri=config.recipe.target, size=size)


def is_output_valid(result: PushResult, config: PushConfig, environment: Environment) -> bool:
    """Return whether the target contains the model of the result; read every byte of it."""
    target = resolve_target(config.recipe.target, environment)
    return metadata(target) is not None and model_digest(target) == result.digest


def resolve_target(uri: str, environment: Environment) -> Path:
    """Return the folder to publish to; raise ConfigInvalid if it contains files that no push wrote."""
    if uri.startswith("pvc://") and not uri.removeprefix("pvc://").partition("/")[2].strip("/"):
        raise ConfigInvalid(f"push.target {uri}: the root of a claim cannot be replaced; use pvc://CLAIM/PATH")
    target = locate(uri, environment).resolve()
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return target
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
    return target


def publish(config: PushConfig, context: Context, adapter: Path, target: Path, about: dict[str, object]) -> None:
    """Merge the model, write it to a temporary folder and rename that to the target.

    Raise Unchanged, and write nothing, if the target already contains the same model.
    """
    progress, environment = context.progress, context.environment
    progress.update(step=0, total=2, note="merging")
    base = fetch_model(config.model.uri, config.model.revision, environment)
    model = merge_adapter(base, adapter, DTYPES[config.recipe.dtype])
    tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
    prepared = read_result(environment.stage_dir("prepare", config.prepare))
    if isinstance(prepared, PrepareResult) and prepared.conversations:
        # The template used in training, which is a default one if the base model has none.
        tokenizer.chat_template = template_of(tokenizer)
    progress.update(step=1, note="writing")
    with _check_disk_space(model, target, config.recipe.target), atomic_folder(target) as folder:
        model.save_pretrained(folder, max_shard_size=SHARD)
        tokenizer.save_pretrained(folder)
        (folder / CARD).write_text(card(config, environment, target.name))
        for path in files_in(folder):
            path.chmod(FILE_MODE)
        seal(folder, about)
        if metadata(target) is not None and model_digest(target) == model_digest(folder):
            raise Unchanged
    progress.update(step=2, note="published")


@contextmanager
def _check_disk_space(model: Any, target: Path, uri: str) -> Iterator[None]:
    """Raise ServiceUnavailable if the disk has too little free space, or if a write in the block fails."""
    needed = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
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
