"""What a run on this machine has published, and where it is."""

from pathlib import Path

from finetune_cli.output.model_text import LATEST
from finetune_cli.runs import manifest_of
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.local.cluster import Folders
from finetune_trainer.contract import (
    Environment,
    PrepareResult,
    PublishedTarget,
    PushResult,
)
from finetune_trainer.contract.environment import InvalidLocation
from finetune_trainer.contract.uris import hub_id


def published(pipeline: Pipeline) -> PublishedTarget | None:
    """Return the merged model that push published, else the adapter, or None."""
    push = pipeline.status.result(PushResult)
    if push is None:
        return None
    return push.first("Merged") or push.first("Adapter")


def published_model(pipeline: Pipeline | None) -> str | None:
    """Return the URI of the merged model that push published, or None."""
    target = published(pipeline) if pipeline else None
    # An adapter cannot be served without its base model.
    if target is None or target.format != "Merged":
        return None
    return target.uri


def has_turns(pipeline: Pipeline) -> bool:
    """Return whether the model was trained on conversations, so that it answers messages by its chat template."""
    data = pipeline.status.result(PrepareResult)
    return data is not None and data.conversations


def run_environment(folder: Path, pipeline: Pipeline) -> Environment:
    """Return the paths that a reader of the run's URIs needs."""
    manifest = manifest_of(folder)
    return Environment(
        workspace=Folders.under(folder, folder).workspace(pipeline),
        claims=folder / "claims",
        manifest_dir=manifest.parent if manifest else None,
    )


def model_argument(environment: Environment, uri: str) -> str:
    """Return the folder of a model, or its URI if it is in a store: the server downloads it."""
    try:
        return str(environment.locate(uri))
    except InvalidLocation:
        return uri


def place_of(environment: Environment, uri: str) -> Path | str | None:
    """Return the folder of a model, or its name on the Hugging Face hub; None in another store."""
    try:
        folder = environment.locate(uri)
    except InvalidLocation:
        return hub_id(uri)
    latest = folder.parent / LATEST
    # Another pipeline may have published to the same target since then.
    return latest if latest.resolve() == folder.resolve() else folder
