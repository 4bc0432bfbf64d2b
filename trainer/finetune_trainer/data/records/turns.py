"""Divide a conversation into examples, so that each turn is learned exactly as a server asks for it.

In a conversation that ends with it, a turn begins behind the prompt that a server sends, and has the end at which a
server stops. Many templates render an earlier turn otherwise: without its reasoning, or with another end.
So a turn is learned in the text of the whole conversation only if it has the same text there, from the beginning of the
conversation to the end of the turn. Otherwise it has an example of its own, which ends with it.
"""

import os
import re
from dataclasses import dataclass, field
from typing import NamedTuple

from finetune_trainer.data.records.beginnings import Beginnings
from finetune_trainer.data.records.chat_template import ChatTemplate, RenderedChat
from finetune_trainer.data.records.compiled_template import Span
from finetune_trainer.data.records.conversations import Conversation
from finetune_trainer.data.records.records import InvalidRecord, shortened
from finetune_trainer.data.records.template_forms import MARK

LEAST_COMMON = 24
"""Characters before a turn that are the same with and without the dropped text: more than the end of a message."""
UNASKED_CHARACTERS = len("<think>\n")
"""Characters of a server's prompt that a message shows at least."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the assistant in the text of the conversation that ends with it."""

    index: int
    """Index of its message."""
    rendered: RenderedChat
    start: int
    """Position of its first character: the end of the prompt that a server sends."""
    end: int
    """Position behind its end, without trailing white space."""
    unasked: str = ""
    """The end of the server's prompt, if the text does not begin with this prompt."""

    @property
    def text(self) -> str:
        """The text of the conversation that ends with it."""
        return self.rendered.text


@dataclass(slots=True)
class Example:
    """The text of a conversation up to a message, and the turns that are learned in it."""

    rendered: RenderedChat
    messages: int
    """The number of messages that are in the text."""
    spans: dict[int, Span] = field(default_factory=dict)
    """The positions of each learned turn, by the index of its message."""
    marked: list[Span] | None = None
    """What the template's {% generation %} tags mark in these turns; None without tags."""

    @property
    def text(self) -> str:
        """The text of its conversation."""
        return self.rendered.text

    @property
    def loss_spans(self) -> tuple[Span, ...]:
        """The spans that are in the loss, in order."""
        if self.marked is not None:
            return tuple(self.marked)
        return tuple(self.spans[index] for index in sorted(self.spans))


class Division(NamedTuple):
    """A conversation as examples, in the order of their turns."""

    text: str
    """The text of the whole conversation."""
    examples: list[Example]
    unasked: list[str]
    """Sentences about turns that no server asks for in this way."""


def divide(chat: ChatTemplate, conversation: Conversation, first: int = 0) -> Division:
    """Return the examples in which the turns from message `first` on are learned.

    Raise InvalidRecord if the template rejects the conversation, or if nothing would end a turn.
    """
    beginnings = Beginnings(chat, chat.source(conversation))
    whole = Example(beginnings.whole, len(conversation.messages))
    examples = [whole]
    unasked = []
    for index in reversed(conversation.learned_turns(first)):
        turn = _turn(chat, conversation, beginnings, index)
        example = examples[-1]
        end = _end_in(example.text, turn, chat)
        if end is None:
            example = Example(turn.rendered, index + 1)
            examples.append(example)
            end = turn.end
        example.spans[index] = (turn.start, end)
        if turn.unasked:
            unasked.append(_unasked(turn))
    examples = [example for example in reversed(examples) if example.spans]
    if chat.has_marks:
        for example in examples:
            unasked += [
                f"messages[{index}]: the marks {{% generation %}} of the chat template leave out this turn: "
                "set prepare.chatTemplate or unrendered: Warn"
                for index in _mark(chat, example)
            ]
    return Division(whole.text, examples, unasked[::-1])


def _unasked(turn: Turn) -> str:
    return (
        f"messages[{turn.index}]: servers ask for it behind '{shortened(turn.unasked, 24)}', which is not rendered: "
        "set prepare.chatTemplate, chatTemplateArguments or unrendered: Warn"
    )


def _turn(
    chat: ChatTemplate,
    conversation: Conversation,
    beginnings: Beginnings,
    index: int,
) -> Turn:
    rendered = beginnings.rendered(index + 1)
    if not chat.writes_turn_end:
        with_eos = _with_eos(chat, rendered.text, index)
        rendered = rendered._replace(text=with_eos)
    text = rendered.text
    end = len(text.rstrip())
    prompt = beginnings.prompt(index)
    if prompt and text.startswith(prompt):
        return Turn(index, rendered, len(prompt), end)
    # No server asks for a turn without a message before it, or behind messages that the template rejects.
    if index == 0 or not prompt:
        start = _content_start(chat, conversation.before(index + 1), text)
        return Turn(index, rendered, start, end)
    behind = _behind_prompt(beginnings, index, rendered, prompt)
    if behind:
        return Turn(index, behind, len(prompt), len(behind.text.rstrip()))
    # Texts, not paths: the function compares characters.
    common = len(os.path.commonprefix([prompt, text]))  # noqa: RUF071
    unasked = prompt[min(common, len(prompt) - UNASKED_CHARACTERS) :]
    return Turn(index, rendered, common, end, unasked)


def _behind_prompt(
    beginnings: Beginnings, index: int, rendered: RenderedChat, prompt: str
) -> RenderedChat | None:
    """Return a turn behind the prompt of a server, which has more of the earlier messages than the whole text.

    gpt-oss has the reasoning before a call in the prompt behind the call's result, and drops it once an answer
    follows. Return None if the turn is not found in the rendered text.
    """
    try:
        earlier = beginnings.rendered(index).text
    except InvalidRecord:
        # A template may accept these messages only as a prompt.
        return None
    request = prompt.removeprefix(earlier)
    if not request.strip() or request == prompt:
        return None
    text = rendered.text
    best = 0
    start = -1
    for match in re.finditer(re.escape(request), text):
        # The messages directly before the turn are the same in both texts.
        common = _common_end(text[: match.start()], earlier)
        if common > best:
            best = common
            start = match.end()
    if best < LEAST_COMMON:
        return None
    moved = len(prompt) - start
    marks = [(a + moved, b + moved) for a, b in rendered.marks if a >= start]
    return RenderedChat(prompt + text[start:], marks)


def _common_end(text: str, other: str) -> int:
    """Return how many characters at their ends two texts have in common."""
    return len(os.path.commonprefix([text[::-1], other[::-1]]))  # noqa: RUF071  as in _turn


def _with_eos(chat: ChatTemplate, text: str, index: int) -> str:
    if not chat.eos:
        raise InvalidRecord(
            f"messages[{index}]: neither the chat template nor an EOS token ends the turn: "
            "set eos_token in the model's tokenizer_config.json"
        )
    return text.rstrip() + chat.eos


def _content_start(chat: ChatTemplate, until: Conversation, text: str) -> int:
    """Return the position of the content of the last message; 0 if the template does not render it."""
    marked = until.messages[-1] | {"content": MARK}
    changed = chat.text_or_none(until.with_message(len(until.messages) - 1, marked))
    before, mark, _ = (changed or "").partition(MARK)
    return len(before) if mark and text.startswith(before) else 0


def _end_in(text: str, turn: Turn, chat: ChatTemplate) -> int | None:
    """Return the end of a turn in the text of a longer conversation, or None if the text differs up to there."""
    complete = turn.text[: turn.end]
    if text.startswith(complete):
        return turn.end
    ending = chat.earlier_ending
    if not ending or not chat.eos:
        return None
    # EOS may follow the last turn only. It takes no own example to learn it there.
    shorter = complete.removesuffix(chat.eos).rstrip()
    if shorter.endswith(ending) and text.startswith(shorter):
        return len(shorter)
    return None


def _mark(chat: ChatTemplate, example: Example) -> list[int]:
    """Find what the template's tags mark in the turns of an example; return the messages that they leave out."""
    marked = []
    left_out = []
    for index in sorted(example.spans):
        start, end = example.spans[index]
        marks = [
            mark for mark in example.rendered.marks if mark[1] > start and mark[0] < end
        ]
        if not marks:
            left_out.append(index)
            continue
        last_start, last_end = marks[-1]
        # A model that does not learn the end of a turn never stops.
        unmarked = example.text[last_end:end].strip()
        ending = (chat.turn_ending or "").strip()
        if _is_ending(chat, unmarked):
            marks[-1] = (last_start, end)
        elif ending and unmarked.endswith(ending):
            marks.append((end - len(ending), end))
        marked.extend(marks)
    example.marked = marked
    return left_out


def _is_ending(chat: ChatTemplate, text: str) -> bool:
    if not text:
        return False
    if not chat.writes_turn_end:
        return text == chat.eos
    endings = (chat.turn_ending or "", chat.earlier_ending)
    return any(ending.endswith(text) for ending in endings)
