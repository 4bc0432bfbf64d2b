"""The bytes of a byte-level tokenizer's tokens, which are much cheaper to get than the tokens' offsets.

If the bytes of a text's tokens are together the bytes of the text, they show the position of each token in the text.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

# A space, an upper-case letter and characters of two and three bytes show whether the tokenizer changes a text.
_PROBE = "A file é€"
_NOT_UTF8 = b"\xff"
"""Stands for a token whose bytes are unknown: no text contains this byte."""
Ends = NDArray[np.int64]


def byte_alphabet() -> dict[str, int]:
    """Return the byte for which each character of a byte-level vocabulary stands.

    Printable characters of Latin-1 stand for themselves, and the characters from U+0100 on for all other bytes, as in
    GPT-2's tokenizer.
    """
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    alphabet = {}
    next_free = 256
    for byte in range(256):
        if byte in printable:
            alphabet[chr(byte)] = byte
        else:
            alphabet[chr(next_free)] = byte
            next_free += 1
    return alphabet


class TokenBytes:
    """Locates the tokens of texts by their bytes."""

    def __init__(self, backend: Tokenizer) -> None:
        self._pieces = _Pieces(backend)
        self._before, self._after = _added_around(backend)

    @classmethod
    def of(cls, backend: Tokenizer) -> "TokenBytes | None":
        """Return None for a tokenizer that is not byte-level, or that changes the text or adds a space to it."""
        try:
            token_bytes = cls(backend)
        except Exception:  # noqa: BLE001  the library has no class of its own for its errors
            # A tokenizer of words without a token for unknown words.
            return None
        tokens = backend.encode(_PROBE, add_special_tokens=False).ids
        if token_bytes.ends(tokens, _PROBE.encode(), has_added=False) is None:
            return None
        return token_bytes

    def ends(
        self, tokens: Sequence[int], text: bytes, *, has_added: bool
    ) -> Ends | None:
        """Return the positions in the text's bytes behind each token, or None if the tokens are not the text.

        With `has_added`, the tokens include the tokens that the tokenizer puts around every text, which take no bytes.
        """
        before = self._before if has_added else 0
        after = self._after if has_added else 0
        of_text = slice(before, len(tokens) - after)
        # `map` with functions of C: this loop runs over all tokens of all records.
        pieces = list(map(self._pieces.__getitem__, tokens[of_text]))
        if b"".join(pieces) != text:
            return None
        lengths: Ends = np.zeros(len(tokens), dtype=np.int64)
        lengths[of_text] = np.fromiter(map(len, pieces), np.int64, len(pieces))
        return np.cumsum(lengths)


class _Pieces(dict[int, bytes]):
    """The bytes of each token that has occurred."""

    def __init__(self, backend: Tokenizer) -> None:
        super().__init__()
        self._backend = backend
        self._alphabet = byte_alphabet()
        self._added: dict[int, Any] = backend.get_added_tokens_decoder()

    def __missing__(self, token: int) -> bytes:
        piece = self._bytes_of(token)
        self[token] = piece
        return piece

    def _bytes_of(self, token: int) -> bytes:
        # Added tokens are in the vocabulary as plain text, without the byte-level alphabet.
        if token in self._added:
            return str(self._added[token].content).encode()
        letters = self._backend.id_to_token(token) or "?"
        try:
            return bytes(self._alphabet[letter] for letter in letters)
        except KeyError:
            return _NOT_UTF8


def _added_around(backend: Tokenizer) -> tuple[int, int]:
    """Return the numbers of tokens that the tokenizer puts before and after every text."""
    bare = backend.encode(_PROBE, add_special_tokens=False).ids
    added = backend.encode(_PROBE, add_special_tokens=True).ids
    before = 0
    for start in range(len(added)):
        if added[start : start + len(bare)] == bare:
            before = start
            break
    return before, len(added) - len(bare) - before
