"""Looks at the base model, and at the settings that depend on it, in a process of the trainer."""

from typing import Any

from finetune_cli.checks.store_access import environment_of
from finetune_cli.checks.stores import is_remote
from finetune_cli.checks.trainer_process import ask
from finetune_cli.diagnostics import Diagnostic
from finetune_cli.manifest.fields import UriField, has_own_program, sources
from finetune_cli.manifest.manifest import Manifest
from finetune_operator.api.spec import PipelineSpec
from finetune_operator.api.stages.base import recipe_from
from finetune_trainer.contract import Environment, TrainRecipe
from finetune_trainer.contract.environment import InvalidLocation
from finetune_trainer.contract.uris import without_secrets

PROGRAM = "finetune_trainer.training.check"
NOT_LOOKED_AT = "its type, layers and tokenizer were not looked at; prepare reports whether it can be trained"


def base_model(spec: PipelineSpec) -> UriField | None:
    """Return the field of the base model; None if only programs of the user read it."""
    for source in sources(spec):
        if source.kind == "model":
            return source
    return None


def model_findings(
    manifest: Manifest, environment: Environment
) -> tuple[list[Diagnostic], list[str]]:
    """Return the errors in the base model and the settings that depend on it, and notes about them."""
    spec = manifest.spec
    model = base_model(spec)
    if model is None:
        return [], []
    folder = None
    if not is_remote(model.uri):
        try:
            folder = str(environment.locate(model.uri))
        except InvalidLocation:
            # It is reported already.
            return [], []
    variables, _ = environment_of(spec.stages()[model.stage].pod.literal_env())
    findings = ask(PROGRAM, _request(spec, model, folder), variables)
    uri = without_secrets(model.uri)
    if findings is None:
        return [], [f"{uri}: {NOT_LOOKED_AT}"]
    errors = []
    notes = []
    for finding in findings:
        location = tuple(finding["field"].split("."))
        message = finding["message"]
        if finding["is_note"]:
            notes.append(f"spec.{finding['field']}: {message}")
        else:
            errors.append(manifest.diagnostic(location, message))
    return errors, notes


def _request(spec: PipelineSpec, model: UriField, folder: str | None) -> dict[str, Any]:
    recipe = None
    if not has_own_program(spec.train):
        recipe = recipe_from(spec.train, TrainRecipe).model_dump(mode="json")
    return {
        "uri": model.uri,
        "folder": folder,
        "revision": model.revision,
        "context_length": spec.prepare.context_length,
        "recipe": recipe,
    }
