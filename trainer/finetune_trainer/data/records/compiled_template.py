"""A chat template as transformers compiles it, rendered often with little work each time.

`render_jinja_template` of transformers copies all messages and collects its global names at each call. A conversation
is rendered twice for each turn, so that this work would take longer than the template itself. If the template renders
messages in order, a single rendering shows all of it.
"""

from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from jinja2 import nodes
from jinja2.runtime import new_context
from transformers.utils import chat_template_utils

from finetune_trainer.data.records.conversations import Message
from finetune_trainer.data.records.message_loop import (
    END,
    MARKS,
    START,
    LoopedMessages,
    is_generation,
    ordered_form,
)

Span = tuple[int, int]
"""Half-open character range: position of the first character, and position after the last character."""
MAX_FAILURES = 20
"""A template is no longer rendered in order after so many more conversations that look ahead than others."""
_ROLE_AND_CONTENT = 2
_DICT_ATTRIBUTES = frozenset(dir(dict))
_TEXT_METHODS = frozenset(
    {"startswith", "endswith", "split", "strip", "lstrip", "rstrip", "replace"}
)


class TemplateInput(NamedTuple):
    """Messages and tools as a template gets them: of plain JSON values, whatever the record has."""

    messages: list[Message]
    tools: list[Any] | None = None

    @classmethod
    def of(cls, messages: list[Message], tools: list[Any] | None) -> "TemplateInput":
        """Return the input as transformers would make it."""
        if tools is None and all(map(_is_plain, messages)):
            return cls(messages)
        # transformers has no public names for this. The objects of a Parquet file could leave the sandbox.
        plain = chat_template_utils._plain_template_data  # noqa: SLF001
        named = chat_template_utils._alias_reasoning_fields(plain(messages))  # noqa: SLF001
        return cls(named, plain(tools))

    def before(self, index: int) -> "TemplateInput":
        """Return the input up to a message, without it."""
        return TemplateInput(self.messages[:index], self.tools)


def _is_plain(message: Message) -> bool:
    """Return whether a message consists of two texts, so that there is nothing to convert."""
    # Without a loop: this runs for every message.
    has_texts = type(message.get("role")) is str and type(message.get("content")) is str
    return has_texts and len(message) == _ROLE_AND_CONTENT


class InOrder(NamedTuple):
    """The text of a conversation that a template renders message by message."""

    text: str
    marks: list[Span]
    starts: list[int]
    """The position of each message in the text, and behind them the position behind the last message."""


def _marks(blocks: list[str], positions: list[int]) -> list[Span]:
    """Return the spans between the marks among the blocks of a text."""
    spans: list[Span] = []
    if MARKS[START] not in blocks:
        return spans
    starts: list[int] = []
    for block, position in zip(blocks, positions, strict=False):
        if block is MARKS[START]:
            starts.append(position)
        elif block is MARKS[END]:
            spans.append((starts.pop(), position))
    return spans


def _make_look_ups_fast(environment: Any) -> None:
    """Make `message.role` a look-up of the key, and leave out the checks of text methods that are always allowed.

    Jinja first tries an attribute of this name, and catches its error. The results are the same as in the sandbox.
    """
    of_sandbox = type(environment).getattr

    def look_up(value: Any, name: str) -> Any:
        kind = type(value)
        if kind is dict and name in value and name not in _DICT_ATTRIBUTES:
            return value[name]
        if kind is str and name in _TEXT_METHODS:
            return getattr(value, name)
        return of_sandbox(environment, value, name)

    environment.getattr = look_up


class CompiledTemplate:
    """A template with the variables that it always gets. It is compiled when it is rendered first."""

    def __init__(self, text: str, variables: dict[str, Any]) -> None:
        self._text = text
        self._variables = variables
        self._failures = 0

    @cached_property
    def _template(self) -> Any:
        # Compiled in the sandbox of transformers, with its extensions and filters. There is no public name.
        template = chat_template_utils._compile_jinja_template(self._text)  # noqa: SLF001
        _make_look_ups_fast(template.environment)
        return template

    @cached_property
    def _names(self) -> dict[str, Any]:
        """The variables of every rendering."""
        fixed = {"documents": None, "add_generation_prompt": False}
        variables = chat_template_utils._plain_template_data(self._variables)  # noqa: SLF001
        return {**self._template.globals, **fixed, **variables}

    @cached_property
    def _ordered(self) -> Any:
        """The template in a form that renders messages in order; None if there is no such form."""
        environment = self._template.environment
        form = ordered_form(environment.parse(self._text))
        # Such a tag in a macro would mark a place that is not known before the macro's text is written.
        if form is None or any(map(is_generation, form.find_all(nodes.CallBlock))):
            return None
        return environment.from_string(form)

    def in_order(
        self, source: TemplateInput, *, is_prompt: bool = False
    ) -> InOrder | None:
        """Return the text with the positions of its messages; None if the template does not render them in order."""
        if self._failures > MAX_FAILURES:
            return None
        blocks: list[str] = []
        messages = LoopedMessages(source.messages, blocks)
        looped = source._replace(messages=messages)
        try:
            if self._ordered is None:
                return None
            for block in self._blocks(looped, self._ordered, is_prompt=is_prompt):
                blocks.append(block)  # noqa: PERF402  read while it grows
        except Exception:  # noqa: BLE001  the template as it is renders, or raises its own error
            self._failures += 1
            return None
        self._failures = max(0, self._failures - 1)
        # A template may leave its loop early.
        if len(messages.starts) <= len(source.messages):
            return None
        positions = [0, *accumulate(map(len, blocks))]
        starts = [positions[start] for start in messages.starts]
        return InOrder("".join(blocks), _marks(blocks, positions), starts)

    def text(self, source: TemplateInput, *, is_prompt: bool = False) -> str:
        """Return the rendered text; with `is_prompt`, the prompt behind which a model answers.

        Raise whatever the template raises.
        """
        blocks = self._blocks(source, self._template, is_prompt=is_prompt)
        return "".join(blocks)

    def text_with_marks(self, source: TemplateInput) -> tuple[str, list[Span]]:
        """Return the rendered text, and the spans that {% generation %} tags mark in it."""
        blocks: list[str] = []
        marks: list[Span] = []
        # The tags read the position in the text from the blocks so far.
        with self._template.environment.activate_tracker(blocks, marks):
            for block in self._blocks(source, self._template):
                blocks.append(block)  # noqa: PERF402  read while it grows
        return "".join(blocks), marks

    def _blocks(
        self, source: TemplateInput, template: Any, *, is_prompt: bool = False
    ) -> Any:
        names = self._names | MARKS | source._asdict()
        if is_prompt:
            names["add_generation_prompt"] = True
        # Shared: the globals are among the names already.
        context = new_context(
            template.environment, template.name, template.blocks, names, shared=True
        )
        return template.root_render_func(context)
