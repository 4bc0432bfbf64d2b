"""The texts of a conversation, of its first messages, and of a server's prompts behind them."""

from functools import cached_property

from finetune_trainer.data.records.chat_template import ChatTemplate, RenderedChat
from finetune_trainer.data.records.compiled_template import InOrder, TemplateInput


class Beginnings:
    """The beginnings of a conversation: rendered once if the template renders messages in order, else each of them."""

    def __init__(self, chat: ChatTemplate, source: TemplateInput) -> None:
        self._chat = chat
        self._source = source

    @cached_property
    def _in_order(self) -> InOrder | None:
        return self._chat.in_order(self._source)

    @cached_property
    def whole(self) -> RenderedChat:
        """The text of all messages; raises InvalidRecord if the template rejects the conversation."""
        if self._in_order is not None:
            return RenderedChat(self._in_order.text, self._in_order.marks)
        return self._chat.rendered(self._source)

    def rendered(self, count: int) -> RenderedChat:
        """Return the text of the first messages; raise InvalidRecord if the template rejects them."""
        if count == len(self._source.messages):
            return self.whole
        if self._in_order is None:
            return self._chat.rendered(self._source.before(count))
        text, marks, starts = self._in_order
        behind_loop = text[starts[-1] :]
        marked = [mark for mark in marks if mark[1] <= starts[count]]
        return RenderedChat(text[: starts[count]] + behind_loop, marked)

    def prompt(self, count: int) -> str | None:
        """Return the prompt that a server sends behind the first messages; None if the template rejects them."""
        ending = None
        # A template may read the first message in any place.
        if self._in_order is not None and count:
            ending = self._chat.prompt_ending(self._source)
        if self._in_order is None or ending is None:
            return self._chat.prompt(self._source.before(count))
        return self._in_order.text[: self._in_order.starts[count]] + ending
