"""Stage push: the adapter merged into its base model, published as one folder that is whole or not there."""

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
FILE_MODE = 0o644
"""safetensors writes for the owner only, but the one who serves the model may be another user."""


class Unchanged(Exception):
    """The target holds the same model."""


def run(config: PushConfig, context: Context) -> PushResult:
    """Raise ConfigInvalid, SourceNotFound or ServiceUnavailable; the target is then as it was."""
    target = target_of(config.recipe.target, context.environment)
    adapter = adapter_folder(context.environment, config.train)
    made_of: dict[str, object] = {"stage": "push", "identity": config.identity, "adapter": digest_of(adapter)}
    there = metadata(target) == made_of
    if not there:
        try:
            publish(config, context, adapter, target, made_of)
        except Unchanged:
            there = True
    if there:
        print(f"push: {config.recipe.target} holds this model already, nothing is written", flush=True)
    size = sum(path.stat().st_size for path in files_in(target))
    return PushResult(identity=config.identity, digest=model_digest(target), uri=config.recipe.target, size=size)


def is_output_valid(result: PushResult, config: PushConfig, environment: Environment) -> bool:
    """Tell whether the target still holds the model of the result, every byte of it."""
    target = target_of(config.recipe.target, environment)
    return metadata(target) is not None and model_digest(target) == result.digest


def target_of(uri: str, environment: Environment) -> Path:
    """Give the folder to publish to; raise ConfigInvalid where something lies there that is not ours to replace."""
    if uri.startswith("pvc://") and not uri.removeprefix("pvc://").partition("/")[2].strip("/"):
        raise ConfigInvalid(f"push.target {uri}: a claim's root cannot be replaced as a whole; use pvc://CLAIM/PATH")
    target = locate(uri, environment).resolve()
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return target
    try:
        manifest = json.loads((target / MANIFEST).read_bytes())
        ours = manifest["about"]["stage"] == "push"
        strangers = {path.relative_to(target).as_posix() for path in files_in(target)} - set(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        ours, strangers = False, set()
    if not ours:
        raise ConfigInvalid(
            f"push.target {uri}: {target} is there and was not made by a push; move it away or choose another target"
        )
    if strangers:
        raise ConfigInvalid(f"push.target {uri}: {target / min(strangers)} was not made by the push; move it away")
    return target


def publish(config: PushConfig, context: Context, adapter: Path, target: Path, made_of: dict[str, object]) -> None:
    """Merge, write beside the target, and take its place; raise AlreadyThere where it would change nothing."""
    progress, environment = context.progress, context.environment
    progress.update(step=0, total=2, note="merging")
    base = fetch_model(config.model.uri, config.model.revision, environment)
    model = merge_adapter(base, adapter, DTYPES[config.recipe.dtype])
    tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
    prepared = read_result(environment.stage_dir("prepare", config.prepare))
    if isinstance(prepared, PrepareResult) and prepared.conversations:
        tokenizer.chat_template = template_of(tokenizer)  # the one it was trained with, also where it had none
    progress.update(step=1, note="writing")
    with _check_disk_space(model, target, config.recipe.target), atomic_folder(target) as folder:
        model.save_pretrained(folder, max_shard_size=SHARD)
        tokenizer.save_pretrained(folder)
        (folder / CARD).write_text(card(config, environment, target.name))
        for path in files_in(folder):
            path.chmod(FILE_MODE)
        seal(folder, made_of)
        if metadata(target) is not None and model_digest(target) == model_digest(folder):
            raise Unchanged
    progress.update(step=2, note="published")


@contextmanager
def _check_disk_space(model: Any, target: Path, uri: str) -> Iterator[None]:
    """Raise ServiceUnavailable before anything is written where it cannot fit, and where it did not after all."""
    needed = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise ServiceUnavailable(
            f"push.target {uri}: the model needs {needed:,} bytes beside what is there and {free:,} are free; "
            "make room and start again; nothing was changed"
        )
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ServiceUnavailable(
            f"push.target {uri}: cannot be written: {error}; make room and start again; nothing was changed"
        ) from error
