"""Records: their shapes, their fields, and the checks of a field."""

from typing import Any, Literal, NamedTuple

from finetune_trainer.contract import Objective

Shape = Literal[
    "messages",
    "prompt and completion",
    "text",
    "chosen and rejected texts",
    "chosen and rejected messages",
]
Fields = dict[str, Any]


class ShapeFields(NamedTuple):
    """What a shape is made of."""

    objective: Objective
    required: tuple[str, ...]
    """The fields that a record of the shape must have."""
    optional: tuple[str, ...] = ()
    """Fields that it may also have."""
    is_rendered: bool = False
    """Whether a chat template renders it."""


SHAPES: dict[Shape, ShapeFields] = {
    "messages": ShapeFields("SFT", ("messages",), ("tools",), is_rendered=True),
    "prompt and completion": ShapeFields("SFT", ("prompt", "completion")),
    "text": ShapeFields("SFT", ("text",)),
    "chosen and rejected texts": ShapeFields(
        "DPO", ("chosen", "rejected"), ("prompt",)
    ),
    "chosen and rejected messages": ShapeFields(
        "DPO", ("chosen", "rejected"), ("prompt", "tools"), is_rendered=True
    ),
}
"""The shapes of records, a shape a line."""
SUPPORTED_SHAPES: dict[Objective, str] = {
    "SFT": "messages, prompt and completion, or text",
    "DPO": "chosen and rejected, with or without prompt",
}
"""The shapes of an objective, in words."""
CONVERSATIONS: frozenset[Shape] = frozenset(
    shape for shape, fields in SHAPES.items() if fields.is_rendered
)
"""Shapes that a chat template renders."""

KINDS: dict[type, str] = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    bytes: "bytes that are no text",
    list: "a list",
    dict: "an object",
}


class InvalidRecord(Exception):
    """A record cannot be used. The message holds the reason; the caller adds the file and the line."""


def shapes_of(objective: Objective) -> list[Shape]:
    """Return the shapes of records for an objective."""
    return [shape for shape, fields in SHAPES.items() if fields.objective == objective]


def fields_of(shape: Shape) -> frozenset[str]:
    """Return the names of all fields that are read from a record of this shape."""
    return frozenset(SHAPES[shape].required + SHAPES[shape].optional)


def fields_for(objective: Objective) -> frozenset[str]:
    """Return the names of all fields that are read for an objective."""
    return frozenset[str]().union(*map(fields_of, shapes_of(objective)))


def complete_shapes(names: set[str], objective: Objective) -> list[Shape]:
    """Return the shapes whose fields are all present."""
    return [
        shape
        for shape in shapes_of(objective)
        if names.issuperset(SHAPES[shape].required)
    ]


def kind_of(value: object) -> str:
    """Return the name of a value's JSON type, with its article."""
    return KINDS.get(type(value), f"a {type(value).__name__}")


def text_of(fields: Fields, name: str, prefix: str = "") -> str:
    """Return a field that must be text; raise InvalidRecord if it is not, or if it is not valid Unicode.

    `prefix` comes before the name in messages.
    """
    value = fields.get(name)
    if not isinstance(value, str):
        fix = ": write it in quotes" if isinstance(value, int | float) else ""
        raise InvalidRecord(
            f"{prefix}{name} must be a string, it is {kind_of(value)}{fix}"
        )
    # Lone surrogates stand for bytes that are not UTF-8, and tokenizers cannot encode them.
    try:
        value.encode()
    except UnicodeEncodeError as error:
        surrogate = _describe_surrogate(value[error.start])
        raise InvalidRecord(
            f"{prefix}{name}: character {error.start + 1} is {surrogate}: save the file as UTF-8"
        ) from None
    return value


def _describe_surrogate(surrogate: str) -> str:
    # errors="surrogateescape" turns the bytes 0x80 to 0xff into these code points.
    escaped_bytes = range(0xDC80, 0xDD00)
    code = ord(surrogate)
    if code in escaped_bytes:
        return f"byte 0x{code - 0xDC00:02x}, not UTF-8"
    return f"a lone surrogate (\\u{code:04x})"


def check_not_blank(text: str, name: str, fix: str = "") -> None:
    """Raise InvalidRecord if a text has no character but spaces; a fix begins with a colon."""
    if not text.strip():
        raise InvalidRecord(f"{name} is empty{fix or ': there is nothing to learn'}")


def shortened(text: str, limit: int = 80) -> str:
    """Return a text of the data for a message: in ASCII, and with an ellipsis if it is cut."""
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    # Without the quotes that `ascii` writes around a text.
    return ascii(text)[1:-1]
