"""The chat templates that TRL and transformers ship as data."""

import ast
import importlib.util
from pathlib import Path
from typing import Any

from support.trainer.renderings import TEMPLATES, TokenizerWithTemplate

from finetune_trainer.data.records.chat_template import ChatTemplate
from finetune_trainer.data.records.conversations import conversation_of
from finetune_trainer.data.records.forms import form_of
from finetune_trainer.data.records.rendering import Rendering, render


def shipped_by_transformers() -> dict[str, str]:
    """Return the chat templates in the source of transformers, by the names of models."""
    spec = importlib.util.find_spec("transformers")
    assert spec
    templates = {}
    for path in Path(str(spec.origin)).parent.glob("models/*/processing_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            if "{%" in node.value and "messages" in node.value:
                templates[f"transformers-{path.parent.name}"] = node.value
    return templates


TRL_TEMPLATES = {path.stem: path.read_text() for path in TEMPLATES.glob("*.jinja")}
ALL_TEMPLATES = TRL_TEMPLATES | shipped_by_transformers()
MARKED = [name for name in sorted(TRL_TEMPLATES) if f"{name}_training" in TRL_TEMPLATES]
"""Templates with a variant of TRL's, whose marks say what to learn."""
OF_PARTS = ("idefics3", "smolvlm", "llava_next")
"""Templates that read a content of parts only."""
CHATS: dict[str, ChatTemplate] = {}
"""Compiled once for all examples of a template."""


def rendering_in(name: str, record: dict[str, Any]) -> Rendering:
    """Return the rendering of a record of any form; raise InvalidRecord."""
    if name not in CHATS:
        CHATS[name] = ChatTemplate(TokenizerWithTemplate(ALL_TEMPLATES[name]))
    form = form_of([key for key, value in record.items() if value], "SFT")
    assert form
    return render(CHATS[name], conversation_of(form.convert(record)))


def with_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        message | {"content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]
