"""The bytes of a byte-level tokenizer's tokens, which are much cheaper to get than the tokens' offsets.

Where the bytes of a text's tokens are together the bytes of the text, they show where in the text each token is.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

_PROBE = "A file é€"
_NOT_UTF8 = b"\xff"
"""Stands for a token whose bytes are unknown: no text contains it."""
Ends = NDArray[np.int64]


def byte_alphabet() -> dict[str, int]:
    """Return the byte for which each character of a byte-level vocabulary stands.

    Printable characters of Latin-1 stand for themselves, and the characters from U+0100 on for all other bytes.
    """
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


class TokenBytes:
    """Locates the tokens of texts by their bytes."""

    def __init__(self, backend: Tokenizer) -> None:
        self._pieces = _Pieces(backend)
        self._before, self._after = _added_around(backend)

    @classmethod
    def of(cls, backend: Tokenizer) -> "TokenBytes | None":
        """Return None for a tokenizer that is not byte-level, or that changes the text or adds a space to it."""
        found = cls(backend)
        tokens = backend.encode(_PROBE, add_special_tokens=False).ids
        return None if found.ends(tokens, _PROBE.encode(), has_added=False) is None else found

    def ends(self, tokens: Sequence[int], text: bytes, *, has_added: bool) -> Ends | None:
        """Return the positions in the text's bytes behind each token, or None if the tokens are not the text.

        `has_added` says that the tokens include those that the tokenizer puts around every text, which take no bytes.
        """
        before, after = (self._before, self._after) if has_added else (0, 0)
        pieces = list(map(self._pieces.__getitem__, tokens[before : len(tokens) - after]))
        if b"".join(pieces) != text:
            return None
        lengths: Ends = np.zeros(len(tokens), dtype=np.int64)
        lengths[before : len(tokens) - after] = list(map(len, pieces))
        return np.cumsum(lengths)


class _Pieces(dict[int, bytes]):
    """The bytes of each token that has occurred."""

    def __init__(self, backend: Tokenizer) -> None:
        super().__init__()
        self._backend, self._alphabet = backend, byte_alphabet()
        self._added: dict[int, Any] = backend.get_added_tokens_decoder()

    def __missing__(self, token: int) -> bytes:
        self[token] = piece = self._bytes_of(token)
        return piece

    def _bytes_of(self, token: int) -> bytes:
        if token in self._added:
            return str(self._added[token].content).encode()
        try:
            return bytes(
                self._alphabet[letter] for letter in self._backend.id_to_token(token) or "?"
            )
        except KeyError:
            return _NOT_UTF8


def _added_around(backend: Tokenizer) -> tuple[int, int]:
    """Return how many tokens the tokenizer puts before and behind every text."""
    bare = backend.encode(_PROBE, add_special_tokens=False).ids
    added = backend.encode(_PROBE, add_special_tokens=True).ids
    before = next((at for at in range(len(added)) if added[at : at + len(bare)] == bare), 0)
    return before, len(added) - len(bare) - before
