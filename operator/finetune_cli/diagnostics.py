"""Errors in a manifest with their positions, and errors in the arguments of a command."""

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

# An error should stay one line, whatever the manifest holds.
SHOWN_CHARACTERS = 60
# difflib takes quadratic time, and a manifest may have words of any length.
MATCHED_CHARACTERS = 200
"""So much of a word is compared."""
CREDENTIALS = re.compile(r"://[^/@\s]*@")
"""A user name and a password in a URI, which must not be printed."""


@dataclass(frozen=True)
class Diagnostic:
    """One error or warning in a manifest."""

    file: Path
    line: int | None
    """From 1; None if the diagnostic is about the whole file."""
    path: str
    """For example spec.train.lora.rank; empty if the diagnostic is about the whole document."""
    message: str

    @override
    def __str__(self) -> str:
        # FILE:LINE, as compilers write it: editors jump to it.
        position = str(self.file)
        if self.line:
            position += f":{self.line}"
        return ": ".join(part for part in (position, self.path, self.message) if part)


class InvalidManifest(Exception):
    """The manifest cannot be used; `diagnostics` holds all its errors."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        super().__init__("\n".join(map(str, self.diagnostics)))


def sort_diagnostics(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Return the diagnostics without duplicates, sorted by line, path and message."""

    def position(diagnostic: Diagnostic) -> tuple[int, str, str]:
        return (diagnostic.line or 0, diagnostic.path, diagnostic.message)

    return sorted(set(diagnostics), key=position)


def closest_match(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is most similar to `word`, ignoring case; None if none is similar."""
    by_lower_case = {name.lower(): name for name in known}
    start = word.lower()[:MATCHED_CHARACTERS]
    matches = difflib.get_close_matches(start, by_lower_case, n=1, cutoff=0.6)
    if not matches:
        return None
    return by_lower_case[matches[0]]


def quoted(value: object) -> str:
    """Return a value as a message shows it: quoted text, JSON, or its kind; shortened to SHOWN_CHARACTERS."""
    match value:
        case None:
            return "nothing"
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case str():
            text = _quoted_text(value)
        case _:
            # As JSON and not as Python: true and not True, as the manifest spells it.
            text = json.dumps(value)
    if len(text) > SHOWN_CHARACTERS:
        return f"{text[: SHOWN_CHARACTERS - 1]}…"
    return text


def _quoted_text(value: str) -> str:
    shown = CREDENTIALS.sub("://…@", value)
    # Escaped if it cannot be printed: control characters could move the cursor or change colours.
    if not shown.isprintable():
        return ascii(shown)
    return f"'{shown}'"


class UsageError(Exception):
    """The command cannot start with these arguments; the message says why and how to fix it."""
