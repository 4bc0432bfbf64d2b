"""The numbers of rotary position embeddings (RoPE) in config.json, which a model must have as it was trained.

transformers ignores a scaling without a type, computes with most wrong numbers without an error, and fails for others
with an error that names no key.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SCALINGS = ("rope_scaling", "rope_parameters")
"""Keys of config.json with a RoPE scaling: before transformers 5, and since."""
SCALING_KEYS = frozenset({"factor", "short_factor", "long_factor", "low_freq_factor"})
"""Keys of a RoPE scaling that mean nothing without its type."""
BASE = re.compile(r"(?:.*_)?rope_theta|rope_local_base_freq|rotary_emb_base")
"""Keys with the base of the frequencies."""
NUMBERS = frozenset(
    {
        *("attention_factor", "beta_fast", "beta_slow", "high_freq_factor"),
        *("low_freq_factor", "mscale", "mscale_all_dim", "partial_rotary_factor"),
        *("factor", "original_max_position_embeddings"),
    }
)
"""Keys of a scaling with a number."""
AT_LEAST_ONE = frozenset({"factor", "original_max_position_embeddings"})
"""Keys whose number must not be below 1."""
LISTS = ("short_factor", "long_factor")
"""Keys of a scaling with a number for each frequency."""
REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": LISTS,
}
"""Type of a scaling -> the keys without which it has no meaning."""
EARLIER_NAMES = {
    "su": "write longrope, which is its name today",
    # It differs in the positions of images only.
    "mrope": "write default, which computes the same for text",
}
"""Types that only a model of another kind, or an earlier release, knows -> the fix."""
PLAIN_NUMBER = re.compile(r"[0-9]+([.][0-9]+)?([eE][+-]?[0-9]+)?")
OF_IMAGES = "axial"
"""The default type of multimodal models, such as Qwen3.5, whose language model may be trained."""
AS_TRAINED = "write the number with which the model was trained"


def rope_problem(config: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the RoPE numbers of a config.json, with the fix; None if nothing is."""
    for key, value in config.items():
        problem = _base_problem(key, value)
        if problem:
            return f"{key} of config.json {problem}"
    for name in SCALINGS:
        for scaling in _scalings(config.get(name)):
            problem = _scaling_problem(scaling)
            if problem:
                return f"{name} of config.json {problem}"
    # A multimodal model has a part for its language model.
    for name, part in config.items():
        if isinstance(part, Mapping) and name not in SCALINGS:
            problem = rope_problem(part)
            if problem:
                return problem
    return None


def _scalings(value: object) -> Iterator[Mapping[str, Any]]:
    """Yield the scalings under a key: some models have a scaling for each type of layer."""
    if not isinstance(value, Mapping):
        return
    kinds = [inner for inner in value.values() if isinstance(inner, Mapping)]
    yield from kinds or [value]


def _scaling_problem(scaling: Mapping[str, Any]) -> str | None:
    kind = scaling.get("rope_type") or scaling.get("type")
    if not kind:
        return _problem_without_type(scaling)
    problem = _type_problem(kind)
    if problem:
        return problem
    for name in REQUIRED.get(kind, ()):
        if scaling.get(name) is None:
            return f"has the type {kind} and no {name}: {AS_TRAINED}"
    for name, value in scaling.items():
        problem = _number_problem(name, value)
        if problem:
            return f"is wrong: {name} {problem}"
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        return f"is wrong: high_freq_factor is not above low_freq_factor: {AS_TRAINED}"
    return None


def _problem_without_type(scaling: Mapping[str, Any]) -> str | None:
    if SCALING_KEYS.isdisjoint(scaling):
        for name, value in scaling.items():
            problem = _base_problem(name, value)
            if problem:
                return f"is wrong: {name} {problem}"
        return None
    # The keys show the type. A factor alone may be of three types.
    kind = "linear, dynamic or yarn, by which the model was trained"
    if not scaling.keys().isdisjoint(LISTS):
        kind = "longrope"
    elif "low_freq_factor" in scaling:
        kind = "llama3"
    return f'has no type, so that it would have no effect: add "rope_type": {kind}'


def _type_problem(kind: object) -> str | None:
    known = ("default", *sorted(ROPE_INIT_FUNCTIONS))
    if kind in (*known, OF_IMAGES):
        return None
    fix = EARLIER_NAMES.get(str(kind).lower())
    if fix is None:
        fix = f"write the type by which the model was trained: {', '.join(known)}"
    return f"has the type {kind}, which transformers does not have: {fix}"


def _base_problem(name: str, value: Any) -> str | None:
    # Without a value, a model takes its own default. Some models have a base for each layer.
    if BASE.fullmatch(name) is None or value is None or isinstance(value, list | dict):
        return None
    if not _is_number(value):
        return _no_number(value)
    if value <= 0:
        return f"must be above 0, it is {value}: {AS_TRAINED}"
    return None


def _number_problem(name: str, value: Any) -> str | None:
    """Return what is wrong with a value of a scaling that has a type, with the fix."""
    if value is None:
        return None
    if name in LISTS and not _are_positive(value):
        return f"must be a list of numbers above 0: {AS_TRAINED}"
    if name in NUMBERS and not _is_number(value):
        return _no_number(value)
    if name in AT_LEAST_ONE and value < 1:
        return f"must be at least 1, it is {value}: {AS_TRAINED}"
    return _base_problem(name, value)


def _are_positive(values: object) -> bool:
    if not isinstance(values, list) or not values:
        return False
    return all(_is_number(value) and value > 0 for value in values)


def _is_number(value: Any) -> bool:
    """Return whether a value is a finite number. True and false are none in JSON."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _no_number(value: object) -> str:
    """Return what is wrong with a value that is no finite number, with the fix."""
    shown = json.dumps(value)[:40]
    if isinstance(value, str) and PLAIN_NUMBER.fullmatch(value.strip()):
        return f"must be a number, it is a text: write {value.strip()} without quotes"
    return f"must be a number, it is {shown}: {AS_TRAINED}"
