"""Find text for which a tokenizer has no token, and characters that it replaces.

A byte-level tokenizer has a token for every byte, and so for every text. Others write a token such as <unk> for text
that is not in their vocabulary, or leave it out.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from finetune_trainer.data.records.records import shortened

Positions = NDArray[np.int64]
_UNIGRAM_ID = re.compile(rb'"unk_id":(\d+)')
_STATE_BEGINNING = 100
"""Bytes of a model's state in which a Unigram model names its unknown token, before its vocabulary."""
_WORD_CHARACTERS = 24
_MEANT = frozenset("LNPS")
"""Categories of characters with a meaning of their own: letters, numbers, punctuation and symbols."""
# A capital, accents, ligatures, wide and typographic characters, and quotation marks of TeX.
_PROBES = (*"AÉéüß½①", "\ufb01", "\uff21", "\u201c", "\u2026", "``", "''")
_SPACES = " \u2581"
"""A space, and the character that stands for it in sentencepiece's vocabularies."""


class UnknownText:
    """Finds the text that the tokens of a tokenizer do not stand for."""

    def __init__(self, backend: Tokenizer) -> None:
        self.token = _unknown_token(backend)
        """Id of the token for unknown text; None if there is none."""
        self._written = ""
        if self.token is not None:
            self._written = backend.id_to_token(self.token) or ""

    def first(
        self, text: str, tokens: Sequence[int], starts: Positions, ends: Positions
    ) -> str:
        """Return the first word with text that no token stands for; empty if there is none.

        `starts` and `ends` are the positions of the tokens in the text's characters.
        """
        if self.token is not None and self.token in tokens:
            for index in np.flatnonzero(np.array(tokens) == self.token).tolist():
                unknown = text[starts[index] : ends[index]].strip()
                # The text may have the token as its own name.
                if unknown and unknown != self._written:
                    return unknown
        for position in _uncovered(len(text), starts, ends):
            if unicodedata.category(text[position])[0] in _MEANT:
                return _word_at(text, position)
        return ""


def unknown_sentence(word: str) -> str:
    """Return the reason why a record with such a word is invalid."""
    shown = shortened(word, _WORD_CHARACTERS)
    return (
        f"unknown text '{shown}': the tokenizer has no token for it: remove it, take a base model whose tokenizer "
        "has it, or allow it with prepare.unrendered: Warn"
    )


def replaced_characters(backend: Tokenizer) -> list[str]:
    """Return what a tokenizer makes of characters that it replaces in every text, such as `A by a`."""
    normalizer: Any = backend.normalizer
    if normalizer is None:
        return []
    replaced = []
    for probe in _PROBES:
        normalized = normalizer.normalize_str(probe).strip(_SPACES)
        if unicodedata.normalize("NFC", normalized) != probe:
            replaced.append(f"{probe} by {normalized or 'nothing'}")
    return replaced


def _unknown_token(backend: Tokenizer) -> int | None:
    model: Any = backend.model
    name = getattr(model, "unk_token", None)
    if name is not None:
        token: int | None = backend.token_to_id(name)
        return token
    # A Unigram model has no attribute for it.
    match = _UNIGRAM_ID.search(model.__getstate__()[:_STATE_BEGINNING])
    return int(match[1]) if match else None


def _uncovered(length: int, starts: Positions, ends: Positions) -> Iterator[int]:
    """Yield the positions of characters in no token."""
    depth = np.zeros(length + 1, dtype=np.int64)
    np.add.at(depth, np.minimum(starts, length), 1)
    np.add.at(depth, np.minimum(ends, length), -1)
    yield from np.flatnonzero(np.cumsum(depth)[:-1] == 0).tolist()


def _word_at(text: str, position: int) -> str:
    """Return the word around a character."""
    before = text[:position].rsplit(" ", maxsplit=1)[-1]
    behind = text[position:].split(" ", maxsplit=1)[0]
    return (before + behind).strip()
