"""A chat template as transformers compiles it, rendered often with little work each time.

`render_jinja_template` of transformers copies all messages and collects its global names at each call. A conversation
is rendered twice for each turn, so that this work would take longer than the template itself.
"""

from functools import cached_property
from typing import Any, NamedTuple

from jinja2.runtime import new_context
from transformers.utils import chat_template_utils

from finetune_trainer.data.records.conversations import Message

Span = tuple[int, int]
"""Half-open character range: position of the first character, and position after the last character."""


class TemplateInput(NamedTuple):
    """Messages and tools as a template gets them: of plain JSON values, whatever the record has."""

    messages: list[Message]
    tools: list[Any] | None = None

    @classmethod
    def of(cls, messages: list[Message], tools: list[Any] | None) -> "TemplateInput":
        """Return the input as transformers would make it."""
        # transformers has no public names for this. The objects of a Parquet file could leave the sandbox.
        plain = chat_template_utils._plain_template_data  # noqa: SLF001
        named = chat_template_utils._alias_reasoning_fields(plain(messages))  # noqa: SLF001
        return cls(named, plain(tools))

    def before(self, index: int) -> "TemplateInput":
        """Return the input up to a message, without it."""
        return TemplateInput(self.messages[:index], self.tools)


class CompiledTemplate:
    """A template with the variables that it always gets. It is compiled when it is rendered first."""

    def __init__(self, text: str, variables: dict[str, Any]) -> None:
        self._text = text
        self._variables = variables

    @cached_property
    def _template(self) -> Any:
        # Compiled in the sandbox of transformers, with its extensions and filters. There is no public name.
        return chat_template_utils._compile_jinja_template(self._text)  # noqa: SLF001

    @cached_property
    def _names(self) -> dict[str, Any]:
        """The variables of every rendering."""
        fixed = {"documents": None, "add_generation_prompt": False}
        variables = chat_template_utils._plain_template_data(self._variables)  # noqa: SLF001
        return {**self._template.globals, **fixed, **variables}

    def text(self, source: TemplateInput, *, is_prompt: bool = False) -> str:
        """Return the rendered text; with `is_prompt`, the prompt behind which a model answers.

        Raise whatever the template raises.
        """
        return "".join(self._blocks(source, is_prompt=is_prompt))

    def text_with_marks(self, source: TemplateInput) -> tuple[str, list[Span]]:
        """Return the rendered text, and the spans that {% generation %} tags mark in it."""
        blocks: list[str] = []
        marks: list[Span] = []
        # The tags read the position in the text from the blocks so far.
        with self._template.environment.activate_tracker(blocks, marks):
            for block in self._blocks(source):
                blocks.append(block)  # noqa: PERF402  read while it grows
        return "".join(blocks), marks

    def _blocks(self, source: TemplateInput, *, is_prompt: bool = False) -> Any:
        template = self._template
        names = self._names | source._asdict()
        if is_prompt:
            names["add_generation_prompt"] = True
        # Shared: the globals are among the names already.
        context = new_context(
            template.environment, template.name, template.blocks, names, shared=True
        )
        return template.root_render_func(context)
