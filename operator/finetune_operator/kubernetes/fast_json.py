"""JSON by pydantic-core, in half the time of the standard library; deeply nested JSON by the latter."""

import json
from contextlib import suppress
from typing import Any

from pydantic_core import from_json, to_json


def decode(content: bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError, or RecursionError if it is nested too deeply."""
    # Also raised for a nesting of more than some 200 levels: a pipeline's user may nest 10,000.
    with suppress(ValueError):
        # Keys only: the values of a page have little in common, and a cache of them costs more than it saves.
        return from_json(content, cache_strings="keys")
    return json.loads(content)


def encode(value: Any) -> bytes:
    """Return a value as JSON without white space. Raises RecursionError if it is nested too deeply."""
    try:
        return to_json(value)
    except ValueError:
        # The same limit of nesting.
        return json.dumps(value, separators=(",", ":")).encode()
