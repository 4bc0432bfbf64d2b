"""Stage push: builds the merged model, or the adapter alone, in the workspace, and publishes it to each target."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError
from transformers import AutoTokenizer
from transformers.utils import GENERATION_CONFIG_NAME

from finetune_trainer.contract import (
    Environment,
    PrepareResult,
    PublishedTarget,
    PushConfig,
    PushResult,
    PushTarget,
)
from finetune_trainer.data.base_templates import DEFAULT, base_templates
from finetune_trainer.data.chat_templates import (
    read_chat_templates,
    use_chat_templates,
)
from finetune_trainer.data.records.chat_template import end_tokens, template_of
from finetune_trainer.models.base_model import BaseModel, open_base_model
from finetune_trainer.models.loading import DTYPES, open_trained_adapter
from finetune_trainer.models.trained.merge import is_adapter, merged_size, save_merged
from finetune_trainer.models.trained.published_check import check_published
from finetune_trainer.publishing.base_files import (
    copy_base_files,
    name_tokenizer_class,
    set_chat_templates,
)
from finetune_trainer.publishing.generation_config import generation_config
from finetune_trainer.publishing.model_card import card
from finetune_trainer.publishing.published_model import (
    PublishedModel,
    describe,
    read_published,
)
from finetune_trainer.runtime.artifacts import atomic_folder, digest_of, files_in, seal
from finetune_trainer.runtime.errors import (
    DataInvalid,
    MachineUnable,
    SourceNotFound,
)
from finetune_trainer.runtime.machine.space import more_space
from finetune_trainer.runtime.sources import locate
from finetune_trainer.runtime.stage_folder import Context, read_result
from finetune_trainer.sizes import format_size
from finetune_trainer.stop_signal import StopSignal
from finetune_trainer.stores.port import StoreTarget
from finetune_trainer.stores.publications import CARD
from finetune_trainer.stores.schemes import open_source, open_target
from finetune_trainer.tracking.registry import open_trackers, training_rows
from finetune_trainer.tracking.trackers import Trackers

ADAPTER_FILES = (SAFETENSORS_WEIGHTS_NAME, CONFIG_NAME)
MODELS = "models"
"""Folder of the stage with a folder for each format. It is deleted when all targets have their model."""
# safetensors writes files that only the owner can read, but the model server may run as another user.
FILE_MODE = 0o644


def run(config: PushConfig, context: Context) -> PushResult:
    """Run the stage. Raise the errors of the targets. A target shows the whole model, or nothing of it."""
    trackers = open_trackers(config, context)
    requested = config.recipe.targets
    # Before the work of merging, so that a target that cannot be opened costs none.
    stores = [open_target(target, context.environment) for target in requested]
    models = Models(config, context)
    formats = dict.fromkeys(target.format for target in requested)
    # All formats before the first target, so that a full disk leaves no target changed.
    built = {form: models.build(form) for form in formats}
    published = []
    for number, (target, store) in enumerate(zip(requested, stores, strict=True)):
        folder, model = built[target.format]
        context.progress.update(
            step=number, total=len(stores), note=f"publishing to {target.uri}"
        )
        context.fence.check()
        published.append(publish(target, store, folder, model, context.stop))
    context.progress.update(step=len(stores), total=len(stores), note="published")
    context.fence.check()
    cards: dict[str, str] = {
        form: (folder / CARD).read_text("utf-8") for form, (folder, _) in built.items()
    }
    shutil.rmtree(context.folder / MODELS, ignore_errors=True)
    result = PushResult(
        identity=config.identity, digest=published[0].digest, published=tuple(published)
    )
    report(config, context, result, trackers, cards)
    return result


def report(
    config: PushConfig,
    context: Context,
    result: PushResult,
    trackers: Trackers,
    cards: Mapping[str, str],
) -> None:
    """Record the published model with the trackers, its card, and what interruptions cost its training.

    `cards` has the model card of each format.
    """
    model = result.first("Merged") or result.published[0]
    with trackers:
        trackers.log_all_rows(training_rows(context.environment, config.train))
        trackers.log_scores(config.lineage.model_dump(exclude={"pipeline"}))
        trackers.register_model(model.uri, model.digest)
        # Last: of all the calls, only an upload needs the server's store of files.
        trackers.log_card(cards[model.format])


def publish(
    target: PushTarget,
    store: StoreTarget,
    folder: Path,
    model: PublishedModel,
    stop: StopSignal,
) -> PublishedTarget:
    """Publish a built model to one target."""
    names = [path.relative_to(folder).as_posix() for path in files_in(folder)]
    # The stores stop between two blocks of bytes, so that none is left half written.
    with stop.deferred():
        publication = store.publish(folder, model.digest, names)
    sent = f"sent {format_size(publication.sent_bytes)} of {format_size(model.size)}"
    print(f"push: {publication.uri}: {sent}", flush=True)
    return PublishedTarget(
        target=target.uri,
        uri=publication.uri,
        format=target.format,
        digest=model.digest,
        size=model.size,
    )


def is_output_valid(
    result: PushResult,
    config: PushConfig,  # noqa: ARG001  the same for all stages
    environment: Environment,
) -> bool:
    """Return whether all targets still have the models of the result."""
    return all(_is_published(target, environment) for target in result.published)


def _is_published(target: PublishedTarget, environment: Environment) -> bool:
    """Return whether a target still has its model; read every byte of it on a volume, list it in a store.

    A damaged model counts as missing: the stage runs again and sends the missing files.
    """
    try:
        source = open_source(target.uri, "model")
        if source is not None:
            return bool(source.list_files(None).files)
        model = read_published(locate(target.uri, environment))
    except (SourceNotFound, DataInvalid):
        return False
    return model is not None and model.digest == target.digest


@dataclass(frozen=True)
class Models:
    """The models to publish, built in the workspace. A process that is started again finds the complete folders."""

    config: PushConfig
    context: Context

    @cached_property
    def base(self) -> BaseModel:
        """The base model."""
        return open_base_model(
            self.config.model, self.context.environment, self.config.model_pin
        )

    @cached_property
    def adapter(self) -> Path:
        """The folder of the adapter."""
        return open_trained_adapter(
            self.context.environment, self.config.train, self.base
        )

    def build(self, form: str) -> tuple[Path, PublishedModel]:
        """Return the sealed folder of a format, and its manifest.

        Raise ConfigInvalid, SourceNotFound, or MachineUnable if the disk is full.
        """
        folder = self.context.folder / MODELS / form.lower()
        about: dict[str, object] = {
            "stage": "push",
            "identity": self.config.identity,
            "format": form,
            "adapter": digest_of(self.adapter),
            "model": self.base.digest,
        }
        model = read_published(folder)
        if model is None or model.about != about:
            self.context.fence.check()
            # A model of other inputs is useless, and its space may be needed.
            shutil.rmtree(folder, ignore_errors=True)
            self._write(form, folder, about)
            model = describe(folder)
        return folder, model

    def _write(self, form: str, folder: Path, about: dict[str, object]) -> None:
        dtype = DTYPES[self.config.recipe.dtype]
        environment = self.context.environment
        is_merged = form == "Merged"
        needed = (
            merged_size(self.base.folder, dtype)
            if is_merged
            else _size_of(self.adapter)
        )
        with (
            _check_disk_space(needed, folder),
            atomic_folder(folder, fence=self.context.fence) as temporary,
        ):
            if is_merged:
                self.context.progress.update(note="merging")
                save_merged(self.base.folder, self.adapter, dtype, temporary)
            else:
                for name in ADAPTER_FILES:
                    shutil.copyfile(self.adapter / name, temporary / name)
            save_tokenizer(
                self.config,
                environment,
                self.base.folder,
                temporary,
                is_merged=is_merged,
            )
            check_published(temporary, self.base.folder)
            readme = card(
                self.config, environment, form, has_adapter=is_adapter(self.adapter)
            )
            (temporary / CARD).write_text(readme)
            for path in files_in(temporary):
                path.chmod(FILE_MODE)
            seal(temporary, about)


def save_tokenizer(
    config: PushConfig,
    environment: Environment,
    base: Path,
    folder: Path,
    *,
    is_merged: bool,
) -> None:
    """Write the base model's tokenizer, processors and generation config, with what training changed in them.

    These are the chat template, if the base model has none, and the tokens that end an answer.
    """
    tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
    templates = read_chat_templates(environment, config.prepare)
    if not templates and not tokenizer.chat_template:
        # A program of the user prepared the rows.
        templates = base_templates(tokenizer, base).by_name
    use_chat_templates(tokenizer, templates)
    prepared = read_result(environment.stage_dir("prepare", config.prepare))
    conversations = isinstance(prepared, PrepareResult) and prepared.conversations
    copy_base_files(base, folder)
    if not is_merged:
        name_tokenizer_class(folder, type(tokenizer).__name__)
    if conversations and not tokenizer.chat_template:
        # The base model has no template, and a server needs one.
        templates = {DEFAULT: template_of(tokenizer)}
        use_chat_templates(tokenizer, templates)
    set_chat_templates(folder, templates)
    generation = generation_config(
        base, end_tokens(tokenizer, conversations=conversations)
    )
    text = json.dumps(generation, indent=2)
    (folder / GENERATION_CONFIG_NAME).write_text(f"{text}\n")


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_in(folder))


@contextmanager
def _check_disk_space(needed: int, folder: Path) -> Iterator[None]:
    """Raise MachineUnable if the workspace has too little free space, or if a write in the block fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    fix = f"{more_space()} and retry; no target has changed"
    if free < needed:
        raise MachineUnable(
            f"push: the model needs {format_size(needed)} of the workspace and {format_size(free)} are free; {fix}"
        )
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise MachineUnable(
            f"push: cannot write the model to the workspace: {error}; {fix}"
        ) from error
