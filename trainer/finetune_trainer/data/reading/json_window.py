"""Read the values of a JSON text without holding the whole text in memory."""

import json
import re
from typing import Any, TextIO

from finetune_trainer.data.records.json_text import RepeatedKey, repeated_key
from finetune_trainer.runtime.errors import DataInvalid

JSON_CHUNK = 64 * 1024
"""Characters read at a time."""
# Without a limit, an unclosed quote would load the whole file.
LONGEST_RECORD = 64 * 1024 * 1024
"""Maximum size of a record in characters (bytes for JSON Lines)."""

# Python refuses them, because reading them takes time that grows with the square of their digits.
LONG_INTEGER = "an integer has more than 4,300 digits: write it as a text"


class JsonWindow:
    """A sliding window over a JSON text: the part in memory starts at the next unread character."""

    _space = re.compile(r"[ \t\r\n]*")

    def __init__(self, name: str, file: TextIO) -> None:
        self.line = 1
        self._name = name
        self._file = file
        self._text = ""
        self._at = 0
        """Position in the text of the next unread character."""
        self._ended = False
        self._repeated = ""
        """A sentence about a key that an object of the value has twice."""
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object)

    def fault(self, message: str, at: int | None = None) -> DataInvalid:
        """Return an error at the current line, or at the line of a character of the window."""
        line = self.line
        if at:
            line += self._text.count("\n", self._at, at)
        return DataInvalid(f"{self._name}:{line}: {message}")

    def peek(self) -> str:
        """Return the next non-space character, or an empty string at the end of the file."""
        while True:
            space = self._space.match(self._text, self._at)
            if space is not None:
                self._move(space.end())
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._read_chunk()

    def take(self, expected: str) -> None:
        """Consume the next character; raise DataInvalid if it is not the expected character."""
        character = self.peek()
        if character != expected:
            observed = character or "the end of the file"
            raise self.fault(f"not JSON: expected {expected} and found {observed}")
        self._move(self._at + 1)

    def value(self) -> object:
        """Parse and consume a JSON value; raise DataInvalid if that fails, and then nothing can be read.

        Raise RepeatedKey if an object has a key twice; the value is consumed.
        """
        while True:
            self._repeated = ""
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # Before the end of the file, the value may only be cut by the end of the window.
                if self._ended:
                    raise self.fault(
                        f"not JSON: {error.msg}; nothing after it can be read",
                        error.pos,
                    ) from None
            except RecursionError:
                raise self.fault("nested too deeply") from None
            except ValueError:
                raise self.fault(LONG_INTEGER) from None
            else:
                # A value that ends with the window, for example a number, may continue in the next chunk.
                if end < len(self._text) or self._ended:
                    self._move(end)
                    if self._repeated:
                        raise RepeatedKey(self._repeated)
                    return value
            if len(self._text) - self._at > LONGEST_RECORD:
                raise self.fault(
                    f"not JSON, or a record longer than {LONGEST_RECORD >> 20} MiB"
                )
            self._read_chunk()

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs) and not self._repeated:
            # Not raised here: the end of the value must be known, to go on behind it.
            self._repeated = repeated_key(pairs)
        return fields

    def _move(self, at: int) -> None:
        self.line += self._text.count("\n", self._at, at)
        self._at = at

    def _read_chunk(self) -> None:
        # The window doubles each time, so that a long record is not parsed once per chunk.
        unread = self._text[self._at :]
        chunk = self._file.read(max(JSON_CHUNK, len(unread)))
        self._text = unread + chunk
        self._at = 0
        self._ended = not chunk
