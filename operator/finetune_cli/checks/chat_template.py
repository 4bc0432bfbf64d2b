"""Looks at the chat template of a manifest before anything starts: is it Jinja, and does it read the arguments."""

import importlib.util
from collections.abc import Iterator

from finetune_cli.diagnostics import Diagnostic
from finetune_cli.manifest.fields import Location, has_own_program
from finetune_cli.manifest.manifest import Manifest
from finetune_trainer.contract import Environment, PrepareRecipe
from finetune_trainer.contract.environment import InvalidLocation

LOCATION: Location = ("prepare", "chatTemplate")
ARGUMENTS: Location = ("prepare", "chatTemplateArguments")


def template_errors(
    manifest: Manifest, environment: Environment
) -> Iterator[Diagnostic]:
    """Yield the errors in the chat template, as prepare would report them; none if Jinja is not installed.

    The base model's own template is not read.
    """
    recipe = manifest.spec.prepare
    has_template = recipe.chat_template is not None
    if not has_template or has_own_program(manifest.spec.stages()["prepare"]):
        return
    # The trainer needs Jinja, and the command line does not.
    if importlib.util.find_spec("jinja2") is None:
        return
    for location, message in _errors(recipe, environment):
        yield manifest.diagnostic(location, message)


def _errors(
    recipe: PrepareRecipe, environment: Environment
) -> Iterator[tuple[Location, str]]:
    from finetune_trainer.template_syntax import (  # noqa: PLC0415  it needs Jinja
        TemplateInvalid,
        read_template,
        unread_arguments,
        variables_of,
    )

    text = recipe.chat_template or ""
    uri = recipe.chat_template_uri
    shown = "the template"
    try:
        if uri is not None:
            file = environment.locate(uri)
            if not file.exists() or file.stat().st_size == 0:
                # Reported already, with the other sources.
                return
            shown = file.name
            text = read_template(file)
        variables = variables_of(text)
    except TemplateInvalid as error:
        yield LOCATION, f"{shown}: {error}"
        return
    except (InvalidLocation, OSError):
        return
    for name, message in unread_arguments(recipe.chat_template_arguments, variables):
        yield (*ARGUMENTS, name), message
