"""The chat templates that servers read of a base model: from its processor's files, then from its tokenizer's.

A processor prepares the images of a multimodal model. transformers and vLLM render conversations with its template if
it has one, and with the tokenizer's otherwise.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_trainer.runtime.errors import ConfigInvalid

DEFAULT = "default"
PROCESSOR_TEMPLATES = ("processor_config.json", "chat_template.json")
"""Files with the template of a processor, in the order in which transformers reads them."""
PROCESSORS = ("processor_config.json", "preprocessor_config.json")
"""Files that only a model with a processor has."""
TOKENIZER_TEMPLATES = ("chat_template.jinja", "additional_chat_templates/*.jinja")
"""Files with the templates of a tokenizer, which transformers reads with it."""
ALL_TEMPLATES = ("*.jinja", "*/*.jinja")


@dataclass(frozen=True)
class BaseTemplates:
    """The chat templates of a base model."""

    by_name: dict[str, str]
    """Name -> template; none if no server reads any."""
    source: str = ""
    """The file of the processor that has the default template, if the tokenizer has another or none."""
    differs: bool = False
    """Whether the tokenizer has another template than the processor."""
    unread: tuple[str, ...] = ()
    """Files of templates that neither transformers nor a server reads, if there is no other template."""


def base_templates(tokenizer: Any, folder: Path) -> BaseTemplates:
    """Return the templates of a base model with this tokenizer; raise ConfigInvalid if its processor's is no text."""
    by_name = templates_of(tokenizer)
    own = by_name.get(DEFAULT)
    source, template = _processor_template(folder)
    if template is not None and template != own:
        has_processor = any((folder / name).is_file() for name in PROCESSORS)
        # A file that was left from a processor is not read beside the tokenizer's template.
        if has_processor or not by_name:
            by_name[DEFAULT] = template
            return BaseTemplates(by_name, source, differs=own is not None)
    if by_name:
        return BaseTemplates(by_name)
    return BaseTemplates({}, unread=_unread_files(folder))


def templates_of(tokenizer: Any) -> dict[str, str]:
    """Return the tokenizer's own templates by name."""
    own = tokenizer.chat_template
    if not own:
        return {}
    if isinstance(own, Mapping):
        return dict(own)
    return {DEFAULT: str(own)}


def _processor_template(folder: Path) -> tuple[str, str | None]:
    """Return the file and the default template of the processor; no file and None without a template."""
    for name in PROCESSOR_TEMPLATES:
        path = folder / name
        if not path.is_file():
            continue
        template = json.loads(path.read_bytes()).get("chat_template")
        if isinstance(template, Mapping):
            template = template.get(DEFAULT)
        if template is None:
            continue
        if not isinstance(template, str):
            raise ConfigInvalid(
                f"{name}: chat_template is no text: write the template there, or set prepare.chatTemplate"
            )
        return name, template
    return "", None


def _unread_files(folder: Path) -> tuple[str, ...]:
    read = {path for pattern in TOKENIZER_TEMPLATES for path in folder.glob(pattern)}
    files = {path for pattern in ALL_TEMPLATES for path in folder.glob(pattern)}
    return tuple(sorted(path.relative_to(folder).as_posix() for path in files - read))
