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
}
"""Signs in the output, and what stands for them where they cannot be encoded; any other one becomes a question mark."""


def replace_unencodable() -> None:
    """Write a replacement for what standard output and error cannot encode. UTF-8 stays as it is."""
    codecs.register_error(NAME, _replacement)
    for stream in (sys.stdout, sys.stderr):
        # Another type: None where the parent process closed it, or what a program that imports this one has set.
        if isinstance(stream, io.TextIOWrapper) and not can_encode(
            "".join(REPLACEMENTS), stream.encoding
        ):
            stream.reconfigure(errors=NAME)


def can_encode(text: str, encoding: str) -> bool:
    """Return whether an encoding has all these characters; False for an unknown one."""
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _replacement(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    return "".join(REPLACEMENTS.get(one, "?") for one in characters), error.end
