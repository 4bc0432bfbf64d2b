"""What is wrong with a manifest, and where."""

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class Diagnostic:
    """One thing to mend."""

    file: Path
    line: int | None
    """From 1; None where the file as a whole is meant."""
    path: str
    """spec.train.lora.rank; empty where the document as a whole is meant."""
    message: str

    @override
    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else str(self.file)
        return ": ".join(part for part in (place, self.path, self.message) if part)


class InvalidManifest(Exception):
    """The manifest cannot be used; `problems` says everything that is wrong with it."""

    def __init__(self, problems: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(problems)
        super().__init__("\n".join(map(str, self.diagnostics)))


def sort_diagnostics(problems: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Sort as an editor shows them: by line, each once."""
    return sorted(set(problems), key=lambda problem: (problem.line or 0, problem.path, problem.message))


def closest_match(word: str, known: Iterable[str]) -> str | None:
    """Give the known word that was probably meant, or None."""
    by_folded = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower()[:200], by_folded, n=1, cutoff=0.6)
    return by_folded[near[0]] if near else None


def quoted(value: object) -> str:
    """Show a value as it would stand in the file, cut where it is long."""
    match value:
        case None:
            return "nothing"
        case str():
            text = f"'{value}'" if value.isprintable() else ascii(value)
        case dict():
            return "keys and values"
        case list():
            return "a list"
        case _:
            text = json.dumps(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"


class UsageError(Exception):
    """The command cannot begin with these arguments; says why and what to do."""
