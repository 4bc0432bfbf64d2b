"""The numbers of tokens in a model's configuration, such as eos_token_id, at which generation stops."""

import json
from collections.abc import Mapping
from typing import Any

ENDING = "_token_id"
"""End of the keys that hold the number of a token, or a list of numbers."""


def token_id_problem(settings: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the numbers of tokens in config.json or generation_config.json; None if nothing is.

    A text in place of a number would be published, and generation would never stop at it.
    """
    for key, value in settings.items():
        if isinstance(value, Mapping):
            # A multimodal model has a part for its language model.
            problem = token_id_problem(value)
            if problem:
                return problem
        elif key.endswith(ENDING):
            numbers = value if isinstance(value, list) else [value]
            for number in numbers:
                if not _is_token_id(number):
                    return f"{key} has {_described(number)}"
    return None


def _is_token_id(value: object) -> bool:
    # True and false are numbers in Python only.
    return value is None or type(value) is int


def _described(value: object) -> str:
    shown = json.dumps(value)[:40]
    if isinstance(value, str) and value.isdecimal():
        return f"the text {shown}: write the number {int(value)} without quotes"
    return f"{shown}, which is no number of a token: write the whole number of the token in tokenizer.json"
