"""The data sets and the tokenizer of a preview: whole if they are on this machine, else as little as it takes."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune_trainer.contract import DatasetSource, Environment, PrepareConfig
from finetune_trainer.contract.environment import InvalidLocation, NotMounted
from finetune_trainer.contract.preview import PreviewProblem
from finetune_trainer.data.chat_templates import ChatTemplates, choose_chat_templates
from finetune_trainer.data.reading.datasets import OpenDataset
from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.models.requirements import ModelFiles
from finetune_trainer.models.tokenizer import load_tokenizer
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    ServiceUnavailable,
    SourceNotFound,
    StageError,
)
from finetune_trainer.stores.data_files import DataFile, fetch_dataset
from finetune_trainer.stores.model_files import TEMPLATE_FILES, fetch_model
from finetune_trainer.stores.port import Listing, RemoteFile, StoreSource
from finetune_trainer.stores.schemes import open_source
from finetune_trainer.training.model_check import model_findings
from finetune_trainer.training.requirements import Embeddings

# A user waits for the answer, and a preview that downloads gigabytes is a stage.
MOST_BYTES = 64 << 20
"""Largest file of a store that is downloaded."""
TOKENIZER_FILES = ("*.json", "*.model", "*.txt", *TEMPLATE_FILES)
"""Patterns of a model's files without its weights."""


@dataclass
class Sources:
    """The sources that a preview can read."""

    datasets: list[OpenDataset] = field(default_factory=list)
    tokenizer: Any = None
    """The tokenizer of transformers with the chat templates of training; None if it cannot be loaded."""
    templates: ChatTemplates | None = None
    base: BaseModel | None = None
    """The base model, without a digest; None if it cannot be trained."""
    embeddings: Embeddings | None = None
    """The embeddings of the model; None without a tokenizer."""
    is_sample: bool = False
    """Whether a data set is in a store, so that only its first records are read."""
    problems: list[PreviewProblem] = field(default_factory=list)
    not_looked_at: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def open_all(self, config: PrepareConfig, environment: Environment) -> None:
        """Open the model's tokenizer and each data set; a source that cannot be read is a problem or a note."""
        self.open_model(config, environment)
        held_out = config.validation.fraction or 0.0
        for index, source in enumerate(config.datasets):
            self._open(f"datasets[{index}]", source, held_out, environment)
        validation_set = config.validation.dataset()
        if validation_set:
            self._open("validation", validation_set, 1.0, environment)

    def open_model(self, config: PrepareConfig, environment: Environment) -> None:
        """Open the model's config and tokenizer; what is wrong with them is a problem or a note."""
        if not self._is_mounted(config.model.uri, environment):
            return
        try:
            model = fetch_model(
                config.model.uri,
                environment,
                revision=config.model.revision,
                wanted=TOKENIZER_FILES,
            )
            # Without a digest, which takes reading all weights: a preview binds nothing to the model.
            base = BaseModel(config.model.uri, model.folder, "")
            self._look_at_model(config, base)
            self.base = base
            tokenizer = load_tokenizer(base.uri, base.folder)
            embeddings = Embeddings(base, tokenizer)
        except StageError as error:
            self.add("model.uri", config.model.uri, error)
            return
        if self._use_template(config, base, tokenizer, environment):
            self.tokenizer = tokenizer
            self.embeddings = embeddings

    def _use_template(
        self,
        config: PrepareConfig,
        base: BaseModel,
        tokenizer: Any,
        environment: Environment,
    ) -> bool:
        """Set the chat templates of training; return False if they are unusable or on a claim of the cluster."""
        file = config.recipe.chat_template_uri
        if file and not self._is_mounted(file, environment):
            return False
        try:
            self.templates = choose_chat_templates(
                config.recipe, tokenizer, base, environment
            )
        except StageError as error:
            place, _, _ = str(error).partition(": ")
            if place.startswith("prepare."):
                self.add(place, place, error)
            else:
                self.add("model.uri", config.model.uri, error)
            return False
        self.templates.set_in(tokenizer)
        self.templates.log_date()
        return True

    def _look_at_model(self, config: PrepareConfig, base: BaseModel) -> None:
        """Add the problems of settings that depend on the model; raise ConfigInvalid if it cannot be trained."""
        source = open_source(base.uri, "model", revision=config.model.revision)
        files = ModelFiles.in_folder(base.uri, base.folder)
        if source is not None:
            names = [file.name for file in source.list_files(None).files]
            # Folders of a repository often hold the weights in other formats.
            top = {name for name in names if "/" not in name}
            files = ModelFiles(base.uri, base.folder, top)
        for finding in model_findings(files, config, has_weights=source is None):
            if finding.is_note:
                self.notes.append(f"{finding.field}: {finding.message}")
            else:
                problem = PreviewProblem(
                    field=finding.field,
                    message=finding.message,
                    exit_code=ConfigInvalid.exit_code,
                )
                self.problems.append(problem)

    def _is_mounted(self, uri: str, environment: Environment) -> bool:
        """Return False, with a line about it, for a claim of the cluster: its content may be right."""
        try:
            environment.locate(uri)
        except NotMounted as error:
            self.not_looked_at.append(str(error))
            return False
        except InvalidLocation:
            # A store, or an error that opening the source reports.
            return True
        return True

    def add(self, place: str, uri: str, error: StageError) -> None:
        """Add an error of a source: a problem, unless nothing is known about the source."""
        is_library_missing = isinstance(error.__cause__, ImportError)
        if isinstance(error, ServiceUnavailable) or is_library_missing:
            self.not_looked_at.append(str(error))
            return
        message = str(error).removeprefix(f"{uri}: ")
        problem = PreviewProblem(
            field=place, message=message, exit_code=error.exit_code
        )
        self.problems.append(problem)

    def add_data_error(self, error: StageError) -> None:
        """Add an error of the records to the data set whose file it names first, or to all of them."""
        place = "datasets"
        if len(self.datasets) == 1:
            place = f"{self.datasets[0].field}.uri"
        for dataset in self.datasets:
            if any(str(error).startswith(f"{file.name}:") for file in dataset.files):
                place = f"{dataset.field}.uri"
                break
        self.add(place, str(self.datasets[0].source.uri), error)

    def _open(
        self,
        place: str,
        source: DatasetSource,
        validation_fraction: float,
        environment: Environment,
    ) -> None:
        if not self._is_mounted(source.uri, environment):
            return
        try:
            files = self._files(source, environment)
        except StageError as error:
            self.add(f"{place}.uri", source.uri, error)
            return
        if not files:
            return
        dataset = OpenDataset(
            field=place,
            source=source,
            files=files,
            weight=source.weight,
            validation_fraction=validation_fraction,
        )
        self.datasets.append(dataset)

    def _files(
        self, source: DatasetSource, environment: Environment
    ) -> tuple[DataFile, ...]:
        """Return the files to read of a data set; none if the first file of a store is too large."""
        store = open_source(
            source.uri,
            "dataset",
            revision=source.revision,
            config=source.config,
            split=source.split,
        )
        if store is None:
            files = fetch_dataset(source, environment).files
            return tuple(DataFile(file.path, file.path.name) for file in files)
        self.is_sample = True
        first = _first_file(source.uri, store.list_files(None))
        if first.size is None or first.size > MOST_BYTES:
            self.not_looked_at.append(
                f"{source.uri}: its first file, {first.name}, is larger than {MOST_BYTES >> 20} MiB"
            )
            return ()
        return (_download(store, first, environment.workspace / "sample"),)


def _first_file(uri: str, listing: Listing) -> RemoteFile:
    if not listing.files:
        raise SourceNotFound(f"{uri}: it has no files")
    return listing.files[0]


def _download(store: StoreSource, file: RemoteFile, folder: Path) -> DataFile:
    folder.mkdir(parents=True, exist_ok=True)
    # Numbered: files of two data sets may have the same name.
    number = len(list(folder.iterdir()))
    _, _, name = file.name.rpartition("/")
    path = folder / str(number) / name
    path.parent.mkdir()
    store.download(file, path)
    return DataFile(path, name)
