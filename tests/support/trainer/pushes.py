"""Runs of the stage push with random adapters, and what they leave in the folder of a target."""

import re
from pathlib import Path

from support.operator.adapters import make_adapter
from support.trainer.stages import environment_in, run_to_result

from finetune_trainer.contract import (
    DatasetSource,
    Environment,
    Lineage,
    ModelSource,
    PublishedTarget,
    PushConfig,
    PushRecipe,
    PushResult,
    PushTarget,
)
from finetune_trainer.runtime.artifacts import verify

TARGET = PushTarget(uri="pvc://models/names")


def push_environment(folder: Path, base: Path) -> Environment:
    """Create a workspace with two trained adapters, and a claim named models."""
    environment = environment_in(folder)
    for seed, name in enumerate(("first", "second")):
        make_adapter(environment.stage_dir("train", name) / "output", base, seed=seed)
    (folder / "claims" / "models").mkdir()
    return environment


def push_config(base: Path, **changes: object) -> PushConfig:
    """Return a config that pushes the adapter named first to TARGET; `changes` are its other fields."""
    config = PushConfig(
        identity="p1",
        prepare="d1",
        train="first",
        evaluate="e1",
        model=ModelSource(uri=f"file://{base}", revision="v1"),
        datasets=(
            DatasetSource(uri="hf://people/names/train.jsonl"),
            DatasetSource(uri="hf://people/names/more.jsonl", revision="4711abc"),
            DatasetSource(
                uri="hf://people/verbs", config="en", split="test", weight=0.3
            ),
        ),
        recipe=PushRecipe(targets=(TARGET,)),
        lineage=Lineage(
            pipeline="default/names", interruptions=2, lost_steps=7, lost_seconds=3.5
        ),
    )
    return config.model_copy(update=changes)


def with_targets(
    config: PushConfig, *targets: PushTarget | str, **changes: object
) -> PushConfig:
    """Return the config with other targets and another identity; `changes` are fields of the recipe."""
    chosen = tuple(
        PushTarget(uri=target) if isinstance(target, str) else target
        for target in targets
    )
    recipe = config.recipe.model_copy(update={"targets": chosen, **changes})
    identity = "-".join(target.uri.replace("/", "-") for target in chosen)
    return config.model_copy(update={"recipe": recipe, "identity": identity})


def push(config: PushConfig, environment: Environment) -> PushResult:
    return run_to_result(config, environment, PushResult)


def folder_of(target: Path, result: PushResult | PublishedTarget) -> Path:
    """Return the folder in a target that has the model of a result."""
    return target / result.digest.replace(":", "-")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def unfinished_in(target: Path) -> list[str]:
    """Return the names of folders and links that a live or a killed push has begun."""
    return [
        name
        for name in names_in(target)
        if re.fullmatch(r"\.(sha256-[0-9a-f]{64}|latest)\.[0-9a-f]{8}", name)
    ]


def verify_target(target: Path) -> set[str]:
    """Read every byte of all models that are visible in a target, and return the names of their folders."""
    folders = set(target.glob("sha256-*")) if target.exists() else set()
    for folder in folders:
        verify(folder)
    latest = target / "latest"
    assert not latest.is_symlink() or latest.resolve() in folders
    return {folder.name for folder in folders}
