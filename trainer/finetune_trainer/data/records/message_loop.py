"""Make a form of a chat template that renders messages one after the other, so that a single rendering shows them all.

In this form the text of a message depends on this message and on those before it. So the text of the first messages is
the beginning of the text of all, up to what the template writes behind its loop. Whatever would look ahead, such as
`loop.last` or the number of messages, raises an error in this form. Templates that look ahead in every conversation are
rendered as they are.
"""

from collections.abc import Iterator
from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer
from typing_extensions import override

from finetune_trainer.data.records.conversations import Message

MESSAGES = "messages"
PROMPT = "add_generation_prompt"
LOOP = "loop"
EARLIER = frozenset({"first", "index", "index0", "previtem"})
"""Attributes of a loop that do not depend on later items."""


START = "finetune_generation_start"
END = "finetune_generation_end"


class Mark(str):
    """An empty text that is told from others by its identity."""

    __slots__ = ()

    @override
    def __str__(self) -> str:
        return self


MARKS = {START: Mark(), END: Mark()}
"""Variables of the form, which are blocks of the rendered text before and behind a {% generation %} tag's text."""


class LoopedMessages(list[Message]):
    """Messages that note how many blocks a rendering has before each message, and behind the last."""

    def __init__(self, messages: list[Message], blocks: list[str]) -> None:
        super().__init__(messages)
        self.starts: list[int] = []
        self._blocks = blocks

    @override
    def __iter__(self) -> Iterator[Message]:
        for message in super().__iter__():
            self.starts.append(len(self._blocks))
            yield message
        self.starts.append(len(self._blocks))


def ordered_form(tree: nodes.Template) -> nodes.Template | None:
    """Return a template that renders the same or raises an error; None if it has no single loop over all messages.

    The tree itself is changed.
    """
    aliases = [node for node in tree.body if _is_alias(node)]
    names = {MESSAGES, *(_target(alias) for alias in aliases)}
    loop = _only_loop(tree, names)
    stored = [name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"]
    is_renamed = sum(name in names for name in stored) != len(aliases)
    if loop is None or is_renamed:
        return None
    # What is behind the loop must be the same however many messages there are.
    macros = {macro.name for macro in tree.find_all(nodes.Macro)}
    behind = _WithoutLookingAhead({*names, *stored, *macros, LOOP})
    current = _WithoutLookingAhead({*names, PROMPT})
    for node in tree.body:
        if node is loop:
            _restrict_loop(loop, {*names, PROMPT, LOOP})
            current = behind
        elif node not in aliases:
            current.generic_visit(node)
    return tree


def _only_loop(tree: nodes.Template, names: set[str]) -> nodes.Node | None:
    """Return the loop over all messages, if there is no second loop, and nothing that is written in another place."""
    loops = [node for node in tree.body if _is_loop_over(node, names)]
    kinds = (nodes.Block, nodes.Extends, nodes.Include)
    has_blocks = any(tree.find(kind) is not None for kind in kinds)
    if len(loops) != 1 or has_blocks:
        return None
    return loops[0]


def _is_alias(node: nodes.Node) -> bool:
    """Return whether a statement gives all messages another name."""
    return (
        isinstance(node, nodes.Assign)
        and isinstance(node.target, nodes.Name)
        and isinstance(node.node, nodes.Name)
        and node.node.name == MESSAGES
    )


def _target(alias: Any) -> str:
    name: str = alias.target.name
    return name


def _is_loop_over(node: nodes.Node, names: set[str]) -> bool:
    return (
        isinstance(node, nodes.For)
        and isinstance(node.iter, nodes.Name)
        and node.iter.name in names
        and isinstance(node.target, nodes.Name)
        and not node.recursive
        and not node.else_
    )


def _restrict_loop(loop: Any, forbidden: set[str]) -> None:
    inside = _WithoutLookingAhead(forbidden)
    loop.body = _with_marks([inside.visit(node) for node in loop.body])
    if loop.test:
        loop.test = inside.visit(loop.test)


def _with_marks(parts: list[Any]) -> list[Any]:
    """Return statements with marks in place of calls for {% generation %}, which take longer than what they render."""
    marked: list[Any] = []
    for part in parts:
        if isinstance(part, nodes.If):
            for branch in (part, *part.elif_):
                branch.body = _with_marks(branch.body)
            part.else_ = _with_marks(part.else_)
        if isinstance(part, nodes.For) and not part.recursive:
            part.body = _with_marks(part.body)
        if not is_generation(part):
            marked.append(part)
            continue
        start = nodes.Output([nodes.Name(START, "load")])
        end = nodes.Output([nodes.Name(END, "load")])
        marked.append(nodes.Scope([start, *_with_marks(part.body), end]))
    return marked


def is_generation(node: nodes.Node) -> bool:
    """Return whether a statement is the tag {% generation %}, the only one of an extension that has a body."""
    if not isinstance(node, nodes.CallBlock):
        return False
    return isinstance(node.call.node, nodes.ExtensionAttribute)


class _WithoutLookingAhead(NodeTransformer):
    """Replaces the use of names by an expression that raises an error."""

    def __init__(self, forbidden: set[str]) -> None:
        self._forbidden = forbidden
        self._is_behind_loop = PROMPT not in forbidden

    def visit_Name(self, node: nodes.Name) -> nodes.Node:  # noqa: N802  the name is Jinja's
        if node.ctx != "load" or node.name not in self._forbidden:
            return node
        return nodes.Div(nodes.Const(1), nodes.Const(0))

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:  # noqa: N802
        is_loops = isinstance(node.node, nodes.Name) and node.node.name == LOOP
        if is_loops and node.attr in EARLIER and not self._is_behind_loop:
            return node
        return self.generic_visit(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        """Leave the first message, which is the same however many there are."""
        is_zero = isinstance(node.arg, nodes.Const) and node.arg.value == 0
        if is_zero and isinstance(node.node, nodes.Name) and not self._is_behind_loop:
            return node
        return self.generic_visit(node)

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        """Leave an inner loop its own `loop`, which is known in its body only."""
        inner = _WithoutLookingAhead(self._forbidden - {LOOP})
        node.body = [inner.visit(part) for part in node.body]
        node.iter = self.visit(node.iter)
        node.test = node.test and self.visit(node.test)
        node.else_ = [self.visit(part) for part in node.else_]
        return node
