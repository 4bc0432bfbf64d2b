"""All trackers, and the choice of the trackers that a pipeline asks for."""

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

from finetune_trainer.contract import (
    Environment,
    EvaluateConfig,
    PushConfig,
    Tracking,
    TrainConfig,
)
from finetune_trainer.contract.metric_rows import METRICS, Row, read_rows
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.runtime.stage_folder import Context, read_config
from finetune_trainer.tracking.mlflow import MlflowTracker
from finetune_trainer.tracking.port import PageTracker, TrackedRun
from finetune_trainer.tracking.tensorboard import TensorBoardTracker
from finetune_trainer.tracking.trackers import Trackers
from finetune_trainer.tracking.wandb import WandbTracker

TrackedConfig = TrainConfig | EvaluateConfig | PushConfig

TRACKERS: tuple[Any, ...] = (MlflowTracker, WandbTracker, TensorBoardTracker)
"""The classes of all trackers. Each is called with its settings, the run and the environment."""
PAGE_TRACKERS: tuple[Any, ...] = (MlflowTracker, WandbTracker)
"""The classes of the trackers that show a page."""


def open_trackers(config: TrackedConfig, context: Context) -> Trackers:
    """Return the trackers of the config's run. Connect to none yet.

    Raise ConfigInvalid if a package is missing or a folder cannot be named, SourceNotFound if a claim is not mounted.
    """
    if config.tracking is None:
        return Trackers(config.stage)
    run = tracked_run(config, config.tracking, context)
    trackers = _requested(TRACKERS, config.tracking, run, context.environment)
    return Trackers(config.stage, trackers)


def page_trackers(
    settings: Tracking, run: TrackedRun, environment: Environment
) -> list[PageTracker]:
    """Return the trackers of the settings that show a page. Raise ConfigInvalid if a package is missing."""
    return [*_requested(PAGE_TRACKERS, settings, run, environment)]


def _requested(
    kinds: Sequence[Any], settings: Tracking, run: TrackedRun, environment: Environment
) -> Iterator[Any]:
    for kind in kinds:
        tracker_settings = getattr(settings, kind.name)
        if tracker_settings is None:
            continue
        # Found, not imported: the libraries take seconds to load, and only the tracker's own thread waits for them.
        if importlib.util.find_spec(kind.package) is None:
            raise ConfigInvalid(
                f"tracking.{kind.name} needs the package {kind.package}, which is not installed: "
                f"install finetune-operator[{kind.name}], or remove tracking.{kind.name}"
            )
        yield kind(tracker_settings, run, environment)


def tracked_run(
    config: TrackedConfig, settings: Tracking, context: Context
) -> TrackedRun:
    """Return the run of a config. All stages report to the run of their train stage, with its config as parameters."""
    identity = config.identity if isinstance(config, TrainConfig) else config.train
    train_folder = context.environment.stage_dir("train", identity)
    trained = config if isinstance(config, TrainConfig) else read_config(train_folder)
    params = {}
    if isinstance(trained, TrainConfig):
        params = params_of(trained)
    return TrackedRun(
        identity=identity,
        name=settings.run_name or identity,
        params=params,
        stage=config.stage,
        folder=context.folder,
        train_folder=train_folder,
    )


def training_rows(environment: Environment, train: str) -> list[Row]:
    """Return the metrics of a train stage; a later stage sends them again to trackers that were down."""
    folder = environment.stage_dir("train", train)
    return read_rows(folder / METRICS)


def params_of(config: TrainConfig) -> dict[str, str]:
    """Return all that determines the training result, as text by dotted camelCase name."""
    excluded = {"stage", "identity", *config.non_identity_fields}
    fields = config.model_dump(by_alias=True, mode="json", exclude=excluded)
    # The recipe has no prefix: users know its fields from spec.stages.train.
    recipe = fields.pop("recipe")
    return dict(_flattened({**recipe, **fields}))


def _flattened(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, inner in value.items():
        if inner is None:
            continue
        if isinstance(inner, dict):
            yield from _flattened(inner, f"{prefix}{name}.")
        elif isinstance(inner, list):
            yield f"{prefix}{name}", ", ".join(map(str, inner))
        else:
            yield f"{prefix}{name}", str(inner)
