"""HTML in which every text of a user stays text: it is escaped when it becomes part of an element."""

import re
from collections.abc import Iterable, Sequence
from html import escape

# U+FFFE, U+FFFF and their like in each plane: HTML's parsers report them as errors.
PLANES = 17
"""Planes of Unicode; the last two characters of each are no characters."""
NO_CHARACTERS = "".join(
    chr(plane << 16 | 0xFFFE) + chr(plane << 16 | 0xFFFF) for plane in range(PLANES)
)
# Characters that HTML forbids, and marks that change the order of the characters around them.
UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef"
    + NO_CHARACTERS
    + "]"
)
# Longer texts are cut, because a card has to stay small: users write texts of any length.
LONGEST_TEXT = 240
"""Characters of a text in a table."""
LONGEST_CODE = 160
"""Characters of a digest or a path."""
LONGEST_BLOCK = 2000
"""Characters of lines of a program."""
BADGES = frozenset(
    [
        "succeeded",
        "failed",
        "running",
        "queued",
        "passed",
        "not-passed",
        "belowthreshold",
    ]
)
"""States with a colour."""
VOID = frozenset({"meta", "br"})
"""Elements without content and end."""


class Markup(str):
    """HTML. Any other text is escaped; a sum of both is any other text."""

    __slots__ = ()


Content = str | None
"""Content of an element: HTML, a text, or nothing."""


def visible(text: str) -> str:
    r"""Return a text with unsafe characters written out, as in \u202e."""
    return UNSAFE.sub(
        lambda match: f"\\u{ord(match[0]):04x}", text.replace("\r\n", "\n")
    )


def shortened(text: str, limit: int = LONGEST_TEXT) -> str:
    """Return a text of at most about `limit` characters; of a longer text, its beginning and its length."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]} … ({len(text):,} characters)"


def element(name: str, *content: Content, **attributes: str | float | None) -> Markup:
    """Return an element.

    A trailing `_` of an attribute's name is left out, and each other `_` is written as `-`. None leaves it out.
    """
    written = ""
    for attribute, value in attributes.items():
        if value is not None:
            name_ = attribute.rstrip("_").replace("_", "-")
            text = escape(visible(str(value)))
            written += f' {name_}="{text}"'
    if name in VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(content)}</{name}>")


def join(parts: Iterable[Content], between: str = "") -> Markup:
    """Return the parts in their order, as HTML."""
    return Markup(between.join(_escaped(part) for part in parts if part))


def _escaped(part: str) -> str:
    if isinstance(part, Markup):
        return part
    # Quotes need no escape between tags.
    return escape(visible(part), quote=False)


def section(name: str, title: str, *content: Content) -> Markup:
    """Return a section with a heading; `name` becomes its id. Empty without content."""
    if not any(content):
        return Markup()
    heading = element("h2", title, id=name)
    return element("section", heading, *content, aria_labelledby=name)


def table(
    caption: str,
    head: Sequence[str],
    rows: Iterable[Sequence[Content]],
    kind: str | None = None,
) -> Markup:
    """Return a table whose first column names its rows; empty without rows. On a narrow screen it scrolls by itself."""
    lines = [_row(cells) for cells in rows]
    if not lines:
        return Markup()
    names = [element("th", title, scope="col") for title in head]
    inner = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *names)),
        element("tbody", *lines),
        class_=kind,
    )
    return _scrollable(caption, inner)


def _scrollable(name: str, content: Markup) -> Markup:
    """Return content that scrolls by itself if it is too wide, also with the keyboard."""
    return element("section", content, class_="scroll", aria_label=name, tabindex=0)


def _row(cells: Sequence[Content]) -> Markup:
    first, *others = cells
    return element(
        "tr",
        # A screen reader reads the first cell before each other cell.
        element("th", first, scope="row"),
        *(element("td", cell) for cell in others),
    )


def facts(pairs: Iterable[tuple[str, Content]]) -> Markup:
    """Return names and values as a list of descriptions; pairs without a value are left out."""
    items = [
        element("div", element("dt", name), element("dd", value))
        for name, value in pairs
        if value
    ]
    if not items:
        return Markup()
    return element("dl", *items, class_="facts")


def listing(items: Iterable[Content], kind: str | None = None) -> Markup:
    """Return a list; empty without items."""
    entries = [element("li", item) for item in items if item]
    if not entries:
        return Markup()
    return element("ul", *entries, class_=kind)


def details(summary: str, *content: Content) -> Markup:
    """Return content that is folded below its summary; empty without content."""
    if not any(content):
        return Markup()
    return element("details", element("summary", summary), *content)


def code(text: str, limit: int = LONGEST_CODE) -> Markup:
    """Return a short text of a program, such as a digest or a path."""
    return element("code", shortened(text, limit))


def badge(text: str) -> Markup:
    """Return a state in its colour; a state of another version has none."""
    kind = text.lower().replace(" ", "-")
    colour = "badge"
    if kind in BADGES:
        colour += f" {kind}"
    return element("span", shortened(text, LONGEST_CODE), class_=colour)


def code_block(text: str, label: str, limit: int = LONGEST_BLOCK) -> Markup:
    """Return lines of a program or of its output."""
    # Browsers drop a line break right after <pre>, so an inner element has the text.
    lines = element("pre", element("code", shortened(text, limit)))
    return _scrollable(label, lines)
