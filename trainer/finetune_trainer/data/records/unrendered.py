"""Find the texts of a record that are not in the text that was rendered from it."""

import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from typing_extensions import override

LABEL = re.compile(
    r"[\w.:/@+%-]{0,200}|https?://[!-~]{0,2000}|\d{4}-\d\d-\d\d \d[\d:.+Z-]*"
    # Crawls, such as FineWeb, name their pages so.
    r"|<urn:[\w.:/@+%-]{1,200}>",
    re.ASCII,
)
"""An identifier, a number, a date or a URL: words have spaces between them."""


class Place(NamedTuple):
    """A text of a record, and where it is."""

    name: str
    """For example `messages[0].content`."""
    text: str


def is_label(text: str) -> bool:
    """Return whether a text is an identifier, a number, a date or a URL, which a row may leave out."""
    return LABEL.fullmatch(text) is not None


def texts_of(value: object, name: str, *, labels: bool = False) -> Iterator[Place]:
    """Yield every text of a JSON value, at any depth; labels only if they are asked for."""
    match value:
        case str():
            if labels or not is_label(value):
                yield Place(name, value)
        case dict():
            for key, inner in value.items():
                yield from texts_of(inner, f"{name}.{key}", labels=labels)
        case list():
            for index, inner in enumerate(value):
                yield from texts_of(inner, f"{name}[{index}]", labels=labels)
        case _:
            pass


class RenderedText:
    """A rendered text, in which other texts are searched."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def _compact(self) -> str:
        return _without_spaces(self.text)

    def holds(self, text: str) -> bool:
        """Return whether a text is here: as it is, with other white space, or escaped as in JSON."""
        # Templates trim what they render.
        trimmed = text.strip()
        if trimmed in self.text:
            return True
        return any(form in self._compact for form in _compact_forms(trimmed))


class AnyCase(RenderedText):
    """A rendered text, in which other texts are searched in any case of their letters."""

    def __init__(self, text: str) -> None:
        super().__init__(text.casefold())

    @override
    def holds(self, text: str) -> bool:
        """Return whether a text is here, with letters of any case."""
        return super().holds(text.casefold())


def _compact_forms(text: str) -> Iterator[str]:
    """Yield the text without white space: as it is, in JSON, and in a JSON text inside JSON."""
    yield _without_spaces(text)
    for is_ascii in (False, True):
        escaped = _escaped(text, is_ascii=is_ascii)
        yield _without_spaces(escaped)
        yield _without_spaces(_escaped(escaped, is_ascii=is_ascii))


def _escaped(text: str, *, is_ascii: bool) -> str:
    # Without the quotes around it.
    return json.dumps(text, ensure_ascii=is_ascii)[1:-1]


def _without_spaces(text: str) -> str:
    return "".join(text.split())
