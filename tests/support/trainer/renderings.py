"""Conversations rendered by a chat template, without a tokenizer."""

import importlib.util
from pathlib import Path
from typing import Any

from finetune_trainer.data.records.chat_template import ChatTemplate
from finetune_trainer.data.records.conversations import conversation_of
from finetune_trainer.data.records.records import InvalidRecord
from finetune_trainer.data.records.rendering import Rendering, render

TRL = importlib.util.find_spec("trl")
assert TRL
TEMPLATES = Path(str(TRL.origin)).parent / "chat_templates"
"""The chat templates of models that TRL ships as data."""


class TokenizerWithTemplate:
    """The attributes of a tokenizer that ChatTemplate uses."""

    bos_token_id = 1

    def __init__(self, chat_template: Any, eos: str = "<eos>") -> None:
        self.chat_template = chat_template
        self.special_tokens_map = {"bos_token": "<bos>", "eos_token": eos}

    def get_chat_template(self) -> str:
        return str(self.chat_template)


def rendering_of(
    template: str, fields: dict[str, Any], *, eos: str = "<eos>"
) -> Rendering:
    tokenizer = TokenizerWithTemplate(template, eos)
    return render(ChatTemplate(tokenizer), conversation_of(fields))


def learned_by_example(rendering: Rendering) -> list[list[str]]:
    """Return the texts in the loss of each example."""
    return [
        [example.text[start:end] for start, end in example.loss_spans]
        for example in rendering.examples
    ]


def learned(
    template: str, fields: dict[str, Any], *, eos: str = "<eos>"
) -> list[list[str]]:
    """Return the texts in the loss of each example; raise InvalidRecord as `prepare` does by default."""
    rendering = rendering_of(template, fields, eos=eos)
    if rendering.unrendered:
        raise InvalidRecord(rendering.unrendered[0])
    return learned_by_example(rendering)
