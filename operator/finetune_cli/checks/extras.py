"""Looks for the optional packages that a run on this machine needs; the trainer's image has all of them."""

import importlib.util
from collections.abc import Iterator

from finetune_cli.manifest.fields import Location, has_own_program, sources, targets
from finetune_operator.api.spec import PipelineSpec
from finetune_trainer.contract.uris import scheme_of

PACKAGES = {
    "qlora": "bitsandbytes",
    "gcs": "google.cloud.storage",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "tensorboard": "tensorboardX",
}
"""Extra of this project -> the package that it installs, by the name for import."""


def missing_extras(spec: PipelineSpec) -> Iterator[tuple[Location, str]]:
    """Yield location and message for each setting whose package is not installed here."""
    for location, value, extra in _used_extras(spec):
        package = PACKAGES[extra]
        if is_installed(package):
            continue
        problem = f"{value} needs the package {package}, which is not installed here"
        yield location, f"{problem}: pip install 'finetune-operator[{extra}]'"


def is_installed(package: str) -> bool:
    """Return whether a package can be imported; it is not imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        # A package above it is missing.
        return False


def _used_extras(spec: PipelineSpec) -> Iterator[tuple[Location, str, str]]:
    """Yield location, value and extra of each setting that needs an extra."""
    if not has_own_program(spec.train):
        if spec.train.method == "QLoRA":
            yield ("train", "method"), "QLoRA", "qlora"
        if spec.train.optimizer.name == "AdamW8Bit":
            yield ("train", "optimizer", "name"), "AdamW8Bit", "qlora"
    for name in ("mlflow", "wandb", "tensorboard"):
        if getattr(spec.tracking, name, None) is not None:
            yield ("tracking", name), name, name
    for field in (*sources(spec), *targets(spec)):
        if scheme_of(field.uri) == "gs":
            yield field.location, "gs://", "gcs"
