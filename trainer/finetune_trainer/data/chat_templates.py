"""The chat templates of a run. `prepare` chooses them once; samples, evaluate and push read them from its output."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from finetune_trainer.contract import Environment, PrepareRecipe
from finetune_trainer.contract.chat_template import ChatTemplateOrigin, is_jinja
from finetune_trainer.data.base_templates import DEFAULT, base_templates
from finetune_trainer.data.records.chat_template import template_of
from finetune_trainer.data.template_trial import check_rendering
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    DataInvalid,
    SourceNotFound,
)
from finetune_trainer.runtime.progress.progress import log_line
from finetune_trainer.runtime.sources import locate_existing
from finetune_trainer.template_syntax import (
    TemplateInvalid,
    read_template,
    unread_arguments,
    variables_of,
    with_defaults,
)

FILE = "chat_templates.json"
"""File in the output of `prepare`: name -> template."""
TOOL_USE = "tool_use"
CHOSEN_NAMES = (DEFAULT, TOOL_USE)
"""The templates that transformers chooses itself: the second for conversations with tools. Others are asked by name."""


class BaseFolder(Protocol):
    """A base model on this machine."""

    @property
    def uri(self) -> str:
        """The URI in the manifest, for errors."""

    @property
    def folder(self) -> Path:
        """The folder with its files."""


@dataclass(frozen=True)
class ChatTemplates:
    """The templates for training and for the published model."""

    by_name: Mapping[str, str]
    origin: ChatTemplateOrigin
    problem: str = ""
    """Why conversations cannot be rendered; empty if they can."""

    def set_in(self, tokenizer: Any) -> None:
        """Make them the templates of a tokenizer of transformers."""
        use_chat_templates(tokenizer, self.by_name)

    def log_date(self) -> None:
        """Log that a template writes the date, which is the same in all rows."""
        if any("strftime_now" in template for template in self.by_name.values()):
            log_line(
                "prepare: the chat template writes the date: all rows have 26 July 2024, "
                "and a server writes the day of its answer"
            )

    def check_conversations(self) -> None:
        """Raise ConfigInvalid if conversations would get an invented template beside a file with a template."""
        if self.problem:
            raise ConfigInvalid(self.problem)

    def write(self, folder: Path, *, conversations: bool) -> ChatTemplateOrigin | None:
        """Write the file for later stages. Return the origin, or None if there is no template and none was needed."""
        # A model that learned plain text gets no template that its base model does not have.
        is_needed = conversations or self.origin != "Default"
        by_name = dict(self.by_name) if is_needed else {}
        text = json.dumps(by_name, indent=1, sort_keys=True, ensure_ascii=False)
        (folder / FILE).write_text(f"{text}\n", "utf-8")
        if not is_needed:
            return None
        return self.origin


def choose_chat_templates(
    recipe: PrepareRecipe,
    tokenizer: Any,
    base: BaseFolder,
    environment: Environment,
) -> ChatTemplates:
    """Return the templates of the manifest, of the base model, or the default template.

    The arguments of the recipe are their defaults. Raise ConfigInvalid if a template does not parse, needs what its
    sandbox refuses, or reads none of the variables that an argument names; raise SourceNotFound if its file is missing.
    """
    own = base_templates(tokenizer, base.folder)
    by_name = own.by_name
    problem = ""
    if own.unread:
        problem = (
            f"{base.uri}: has no chat template that servers read, but the file {own.unread[0]}: "
            "set prepare.chatTemplate to a copy of this file if it is the model's template"
        )
    origin: ChatTemplateOrigin = "BaseModel" if by_name else "Default"
    source = (
        f"{base.uri}: its chat template cannot be used, so set prepare.chatTemplate"
    )
    if recipe.chat_template is not None:
        problem = ""
        source = "prepare.chatTemplate"
        origin = "Manifest"
        by_name[DEFAULT] = _text_of(recipe.chat_template, environment)
        # The base model's template for tools would hide the template of the manifest from records with tools.
        if TOOL_USE in by_name:
            by_name[TOOL_USE] = by_name[DEFAULT]
    elif own.differs:
        log_line(
            f"prepare: {own.source} has another chat template than the tokenizer: servers read it, "
            "so it is used, and published for both"
        )
    if not by_name:
        by_name[DEFAULT] = template_of(tokenizer)
    if DEFAULT not in by_name:
        names = ", ".join(sorted(by_name))
        raise ConfigInvalid(
            f"{base.uri} has the chat templates {names}, and none is called default: set prepare.chatTemplate"
        )
    _check(by_name, source, recipe.chat_template_arguments, tokenizer)
    return ChatTemplates(
        {
            name: with_defaults(template, recipe.chat_template_arguments)
            for name, template in by_name.items()
        },
        origin,
        problem,
    )


def use_chat_templates(tokenizer: Any, by_name: Mapping[str, str]) -> None:
    """Make these the templates of a tokenizer of transformers; without any, leave it as it is."""
    if not by_name:
        return
    tokenizer.chat_template = dict(by_name)
    if set(by_name) == {DEFAULT}:
        tokenizer.chat_template = by_name[DEFAULT]


def read_chat_templates(environment: Environment, prepare: str) -> dict[str, str]:
    """Return the templates that the prepare stage with this identity used, by name; raise DataInvalid if damaged.

    There are none if no record needed a template, or if a program of the user has written the rows.
    """
    file = environment.stage_dir("prepare", prepare) / "output" / FILE
    try:
        by_name: dict[str, str] = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DataInvalid(
            f"{file} is damaged: {error}; delete {file.parents[1]} and run the pipeline again"
        ) from None
    return by_name


def _text_of(value: str, environment: Environment) -> str:
    """Return the text of the template that the manifest gives."""
    if is_jinja(value):
        return value
    try:
        return read_template(locate_existing(value, environment))
    except (ConfigInvalid, SourceNotFound) as error:
        raise type(error)(f"prepare.chatTemplate: {error}") from None
    except TemplateInvalid as error:
        raise ConfigInvalid(f"prepare.chatTemplate: {value} {error}") from None


def _check(
    by_name: Mapping[str, str],
    source: str,
    arguments: Mapping[str, Any],
    tokenizer: Any,
) -> None:
    """Raise ConfigInvalid if a template cannot be used, or if no template reads one of the arguments."""
    names: set[str] = set()
    for name in CHOSEN_NAMES:
        template = by_name.get(name)
        if template is None:
            continue
        shown = source if name == DEFAULT else f"{source} ({name})"
        try:
            names |= variables_of(template)
            check_rendering(
                with_defaults(template, arguments), tokenizer.special_tokens_map
            )
        except TemplateInvalid as error:
            raise ConfigInvalid(f"{shown}: {error}") from None
    for name, message in unread_arguments(arguments, names):
        raise ConfigInvalid(f"prepare.chatTemplateArguments.{name}: {message}")
