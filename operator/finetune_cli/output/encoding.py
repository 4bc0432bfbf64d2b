"""Output to a terminal or a file whose encoding lacks the signs of this program, such as ASCII."""

import codecs
import io
import sys

NAME = "finetune"
REPLACEMENTS = {
    "✔": "v",
    "✗": "x",
    "●": "*",
    "○": "o",
    "◌": ".",
    "·": "-",
    "↳": ">",
    "…": "...",
    "—": "-",
    "±": "+-",
    "→": "->",
}
"""Sign in the output -> its replacement if it cannot be encoded; any other character becomes a question mark."""


def replace_unencodable() -> None:
    """Write a replacement for characters that standard output and error cannot encode. UTF-8 stays as it is."""
    codecs.register_error(NAME, _replacement)
    signs = "".join(REPLACEMENTS)
    for stream in (sys.stdout, sys.stderr):
        # Another type: None if the parent process closed it, or a stream that a program has set that imports this one.
        if not isinstance(stream, io.TextIOWrapper):
            continue
        if not can_encode(signs, stream.encoding):
            stream.reconfigure(errors=NAME)


def can_encode(text: str, encoding: str) -> bool:
    """Return whether an encoding has all these characters; False for an unknown encoding."""
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _replacement(error: UnicodeError) -> tuple[str, int]:
    # The handler is registered for decoding, too; only output needs replacements.
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    replaced = [REPLACEMENTS.get(character, "?") for character in characters]
    return "".join(replaced), error.end
