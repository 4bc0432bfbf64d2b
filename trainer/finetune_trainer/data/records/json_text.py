"""Parse JSON, and refuse an object with a key twice: JSON's usual readers keep the last value in silence."""

import json
from typing import Any

from finetune_trainer.data.records.records import InvalidRecord, shortened


class RepeatedKey(InvalidRecord):
    """An object has a key twice."""


def parse_json(text: str) -> Any:
    """Return the value of a JSON text; raise ValueError if it is none, RepeatedKey, or RecursionError."""
    if text.startswith("{"):
        # What `decode` calls in the end, without the search for white space around the value.
        value, end = _DECODER.raw_decode(text)
        if end == len(text):
            return value
    return _DECODER.decode(text)


def repeated_key(pairs: list[tuple[str, Any]]) -> str:
    """Return a sentence about the first key that an object has twice."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            break
        seen.add(key)
    return f"an object has the key {shortened(key)} twice, so a value would be lost: remove one of them"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise RepeatedKey(repeated_key(pairs))
    return fields


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
