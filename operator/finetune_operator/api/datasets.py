"""The data sets of a pipeline, and the records that it validates with, as users write them."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from finetune_operator.api.rules import Rule, WithRules
from finetune_trainer.contract import DatasetSource, Validation

REPOSITORY = re.compile("hf://[^/]+/[^/]+")


SHAPES = (
    ("messages", "tools", "system"),
    ("instruction", "input", "output", "system"),
    ("prompt", "completion"),
    ("text",),
    ("prompt", "chosen", "rejected", "tools"),
)
"""The fields of each kind of record."""
COLUMNS = tuple(dict.fromkeys(name for shape in SHAPES for name in shape))


def _is_of_one_shape(columns: Mapping[str, Any]) -> bool:
    """Return whether some fields have a column, all of the same kind of record."""
    names = columns.keys() - {"ignored"}
    is_empty = not names and not columns.get("ignored")
    return not is_empty and any(names <= set(shape) for shape in SHAPES)


def _names_any(names: Iterable[str]) -> str:
    """Return CEL that is true if `columns` of a source names any of these fields. The source must have `columns`."""
    return " || ".join(f"has(self.columns.{name})" for name in names)


def _one_shape() -> str:
    # CEL has no set of the fields that an object has. So each shape is checked by the fields that it lacks.
    others = [[name for name in COLUMNS if name not in shape] for shape in SHAPES]
    return (
        f"({_names_any(COLUMNS)} || (has(self.columns.ignored) && self.columns.ignored.size() > 0)) && ("
        + " || ".join(f"!({_names_any(names)})" for names in others)
        + ")"
    )


SOURCE_RULES = (
    Rule(
        field="config",
        message="config and split belong to a hub data set without a path: set uri to hf://ORG/NAME, or remove them",
        reason="FieldValueForbidden",
        # Without uri, the rule of uri is broken.
        cel=f"!(has(self.config) || has(self.split)) || !has(self.uri) || self.uri.matches('^{REPOSITORY.pattern}$')",
        is_valid=lambda data: (
            not data.keys() & {"config", "split"}
            or "uri" not in data
            or REPOSITORY.fullmatch(data["uri"]) is not None
        ),
    ),
    Rule(
        field="columns",
        message="must name fields of one kind of record: messages, tools and system; "
        "instruction, input, output and system; prompt and completion; text; or prompt, chosen, rejected and tools",
        cel=f"!has(self.columns) || ({_one_shape()})",
        is_valid=lambda data: (
            "columns" not in data or _is_of_one_shape(data["columns"])
        ),
    ),
)
"""Rules of every data set."""


class Dataset(WithRules, DatasetSource):
    """A data set: records in JSON Lines, JSON, CSV or Parquet files."""

    rules: ClassVar[tuple[Rule, ...]] = SOURCE_RULES


_OF_A_URI = ("revision", "columns", "config", "split")
"""Fields that say something about the data set of a URI, as `format` does."""
_NEEDS_URI_CEL = (
    " || ".join(f"has(self.{name})" for name in _OF_A_URI)
    + " || (has(self.format) && self.format != 'Auto')"
)


def _needs_uri(data: Mapping[str, Any]) -> bool:
    """Return whether a field is set that says something about the data set of a URI."""
    return bool(data.keys() & {*_OF_A_URI}) or data["format"] != "Auto"


class ValidationSet(WithRules, Validation):
    """Records to measure the validation loss: a fraction of each data set, or a data set of their own."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *SOURCE_RULES,
        Rule(
            field="fraction",
            message="set fraction or uri, and not both: a fraction of every data set, or a data set to validate with",
            # A field that needs uri has an error of its own.
            cel=f"has(self.fraction) != has(self.uri) || (!has(self.uri) && ({_NEEDS_URI_CEL}))",
            is_valid=lambda data: (
                ("fraction" in data) != ("uri" in data)
                or ("uri" not in data and _needs_uri(data))
            ),
        ),
        Rule(
            field="uri",
            message="is needed by revision, config, split, format and columns: add uri, or remove them",
            reason="FieldValueForbidden",
            cel=f"has(self.uri) || !({_NEEDS_URI_CEL})",
            is_valid=lambda data: "uri" in data or not _needs_uri(data),
        ),
    )
