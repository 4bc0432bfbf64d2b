"""Find a record's fields in the columns of a data set."""

from collections.abc import Iterable
from typing import Any

from finetune_trainer.contract import Columns, Objective
from finetune_trainer.data.records import (
    OPTIONAL_FIELDS,
    SHAPES,
    SHAPES_OF,
    SUPPORTED_SHAPES,
    Fields,
    InvalidRecord,
    complete_shapes,
    fields_for,
    shortened,
)

_MISSING = object()


class FieldColumns:
    """The columns in which a data set has the fields of its records.

    Where the manifest names columns, it names those of one shape. Only the fields of that shape are read: each from
    the column that the manifest names, or else from the column of its own name. Raises ValueError if it names one of a
    field that is not read for the objective.
    """

    def __init__(self, columns: Columns | None = None, objective: Objective = "SFT") -> None:
        named = columns.model_dump(exclude_none=True) if columns else {}
        self._objective = objective
        if unread := sorted(named.keys() - fields_for(objective)):
            supported = SUPPORTED_SHAPES[objective]
            raise ValueError(
                f"names {unread[0]}, but train.objective {objective} reads {supported}: name its columns"
            )
        self._required: dict[str, str] = {}
        self._optional: dict[str, str] = {}
        self._named = set(named.values())
        for shape in SHAPES_OF[objective]:
            fields, optional = SHAPES[shape], OPTIONAL_FIELDS.get(shape, ())
            if named.keys() & {*fields, *optional}:
                # Without the prompt that the manifest names, another text would be taken for it.
                fields += tuple(field for field in optional if field == "prompt" and field in named)
                self._required |= {field: named.get(field, field) for field in fields}
                self._optional |= {field: named.get(field, field) for field in optional}

    def select(self, record: Fields) -> Fields:
        """Return a record's fields by their own names; raise InvalidRecord if it lacks a column."""
        if not self._required:
            return record
        fields = {field: _value(record, column) for field, column in self._required.items()}
        for field, value in fields.items():
            if value is _MISSING:
                has = ", ".join(map(str, record)) or "none"
                raise InvalidRecord(
                    f"has no column {shortened(self._required[field])} for {field}; its columns are {shortened(has)}"
                )
        found = ((field, _value(record, column)) for field, column in self._optional.items())
        return fields | {field: value for field, value in found if value is not _MISSING}

    def problem(self, names: Iterable[str]) -> str:
        """Return what a table with these columns lacks, or an empty text."""
        present = set(names)
        if not self._required:
            is_complete = complete_shapes(present, self._objective)
            return "" if is_complete else f"needs the columns {SUPPORTED_SHAPES[self._objective]}"
        needed = {*self._required.values(), *self._named}
        missing = sorted(
            column
            for column in needed
            if column not in present and _outermost(column) not in present
        )
        return (
            f"has no column {shortened(missing[0])}, which the manifest names under columns"
            if missing
            else ""
        )

    def among(self, names: Iterable[str]) -> list[str]:
        """Return those of a table's columns that are read."""
        columns = {*self._required.values(), *self._optional.values()} or fields_for(
            self._objective
        )
        wanted = columns | {_outermost(column) for column in columns}
        return [name for name in names if name in wanted]


def _outermost(column: str) -> str:
    return column.partition(".")[0]


def _value(record: Fields, column: str) -> Any:
    if column in record:
        return record[column]
    name, _, rest = column.partition(".")
    inner = record.get(name)
    return _value(inner, rest) if rest and isinstance(inner, dict) else _MISSING
