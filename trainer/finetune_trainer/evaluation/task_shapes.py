"""The forms that lm-eval expects of the values in a task file; with another form, lm-eval's own errors name no key."""

import ast
import difflib
from collections import Counter
from collections.abc import Iterable
from typing import Any

from lm_eval.api.registry import filter_registry
from lm_eval.api.samplers import SAMPLER_REGISTRY

METRICS = "write a list such as [{metric: exact_match}]"
FILTERS = (
    "write a list such as [{name: first, filter: [{function: take_first}]}], "
    "or remove filter_list"
)
TEXTS = ("description", "target_delimiter", "fewshot_delimiter", "gen_prefix")
"""Keys of texts that lm-eval joins to each question."""
GENERATION = "write a mapping such as {until: [TEXT], max_gen_toks: NUMBER}"


def wrong_shape(config: Any) -> str:
    """Return the problem of a value in a task's configuration; empty if all have the form that lm-eval expects."""
    if getattr(config, "output_type", "") is None:
        return "output_type is empty; write multiple_choice, loglikelihood, loglikelihood_rolling or generate_until"
    process_results = getattr(config, "process_results", None)
    if isinstance(process_results, str):
        return f"process_results is {process_results!r}; write !function MODULE.NAME"
    return (
        _wrong_texts(config)
        or _wrong_choices(getattr(config, "doc_to_choice", None))
        or _wrong_examples(getattr(config, "fewshot_config", None))
        or _wrong_number("num_fewshot", getattr(config, "num_fewshot", None) or 0, 0)
        or _wrong_number("repeats", getattr(config, "repeats", 1), 1)
        or _wrong_metrics(
            getattr(config, "metric_list", None), has_function=callable(process_results)
        )
        or _wrong_filters(getattr(config, "filter_list", None))
        or _wrong_generation(getattr(config, "generation_kwargs", None))
    )


def _wrong_texts(config: Any) -> str:
    for key in TEXTS:
        value = getattr(config, key, None)
        # A function of the task's module is called.
        if value is not None and not isinstance(value, str) and not callable(value):
            return f"{key} is {value!r}; write it as text, in quotes"
    return ""


def _wrong_choices(choices: Any) -> str:
    """Return the problem of choices in a text that names a field, but is none, and is no list in a text."""
    if not isinstance(choices, str) or "{" in choices or "," not in choices:
        return ""
    try:
        ast.literal_eval(choices)
    except (ValueError, SyntaxError):
        return f"doc_to_choice is {choices!r}; write a list such as [yes, no], or the name of a field"
    return ""


def _wrong_examples(fewshot: Any) -> str:
    """Return the problem of a fewshot_config whose sampler lm-eval does not have; empty if it has it."""
    sampler = getattr(fewshot, "sampler", None)
    if isinstance(fewshot, dict):
        sampler = fewshot.get("sampler")
    if sampler is None or sampler in SAMPLER_REGISTRY:
        return ""
    names = ", ".join(SAMPLER_REGISTRY)
    return f"fewshot_config: lm-eval has no sampler {sampler}; it has {names}"


def _wrong_number(key: str, number: Any, least: int) -> str:
    # lm-eval takes a negative number of examples for none. YAML's true is a number for Python.
    if type(number) is int and number >= least:
        return ""
    return f"{key} is {number!r}; write a whole number of at least {least}"


def _wrong_metrics(metrics: Any, *, has_function: bool) -> str:
    # A function of the task names its own metrics.
    if metrics is None or (metrics == [] and has_function):
        return ""
    if not isinstance(metrics, list) or not metrics:
        return f"metric_list is {metrics!r}; {METRICS}"
    names = []
    for entry in metrics:
        name = entry.get("metric") if isinstance(entry, dict) else None
        if not isinstance(name, str) and not callable(name):
            return f"metric_list has the entry {entry!r} without a metric; {METRICS}"
        names.append(name)
    # lm-eval would measure the last only.
    return _repeated("metric_list", "metric", names)


def _wrong_filters(filters: Any) -> str:
    if filters is None:
        return ""
    if not isinstance(filters, list) or not filters:
        return f"filter_list is {filters!r}; {FILTERS}"
    for entry in filters:
        problem = _wrong_filter(entry)
        if problem:
            return problem
    return _repeated("filter_list", "filter", [entry["name"] for entry in filters])


def _wrong_filter(entry: Any) -> str:
    steps = entry.get("filter") if isinstance(entry, dict) else None
    if not isinstance(steps, list) or not isinstance(entry.get("name"), str):
        return f"filter_list has the entry {entry!r} without name or filter; {FILTERS}"
    for step in steps:
        function = step.get("function") if isinstance(step, dict) else None
        if callable(function):
            continue
        if not isinstance(function, str):
            return f"filter_list: {entry['name']} has the step {step!r} without a function; {FILTERS}"
        if function not in filter_registry:
            return f"filter_list: lm-eval has no filter {function}{nearest_name(function, filter_registry.keys())}"
    return ""


def _repeated(key: str, noun: str, names: Iterable[Any]) -> str:
    for name, count in Counter(names).items():
        if count > 1:
            return f"{key} has the {noun} {name} {count} times; keep one of them"
    return ""


def _wrong_generation(arguments: Any) -> str:
    if arguments is None:
        return ""
    if not isinstance(arguments, dict):
        return f"generation_kwargs is {arguments!r}; {GENERATION}"
    return _wrong_ends(arguments) or _wrong_sampling(arguments)


def _wrong_ends(arguments: dict[str, Any]) -> str:
    until = arguments.get("until", [])
    ends = until if isinstance(until, list) else [until]
    # lm-eval ends an answer of any text at the empty text.
    if all(isinstance(end, str) and end for end in ends):
        return ""
    return f"generation_kwargs: until is {until!r}; write a list of texts that are not empty"


def _wrong_sampling(arguments: dict[str, Any]) -> str:
    is_sampled = arguments.get("do_sample", False)
    if not isinstance(is_sampled, bool):
        return f"generation_kwargs: do_sample is {is_sampled!r}; write true or false"
    try:
        temperature = float(arguments.get("temperature", 0))
    except (TypeError, ValueError):
        return f"generation_kwargs: temperature is {arguments['temperature']!r}; write a number"
    if is_sampled and temperature <= 0:
        return (
            f"generation_kwargs: do_sample is true, but temperature is {temperature:g}; "
            "set temperature above 0, or do_sample to false"
        )
    return ""


def nearest_name(name: str, names: Iterable[str]) -> str:
    """Return the most similar name as a hint after a message; empty if none is similar."""
    matches = difflib.get_close_matches(name, list(names), 1)
    if not matches:
        return ""
    return f"; did you mean {matches[0]}?"
