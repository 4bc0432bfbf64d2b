"""Find a record's fields in the columns of a data set."""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Any

from finetune_trainer.contract import Columns, Objective
from finetune_trainer.data.records.records import (
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

# Not None: a column with a null is something else than a missing column.
_MISSING = object()


class FieldColumns:
    """The columns in which a data set has the fields of its records.

    A manifest that names columns names the columns of a single shape. Only the fields of this shape are read: each from
    the column that the manifest names, or else from the column of its own name. Raises ValueError if the manifest names
    a column for a field that the objective does not read.
    """

    def __init__(
        self, columns: Columns | None = None, objective: Objective = "SFT"
    ) -> None:
        named: dict[str, str] = columns.model_dump(exclude_none=True) if columns else {}
        self._objective = objective
        unread = sorted(named.keys() - fields_for(objective))
        if unread:
            supported = SUPPORTED_SHAPES[objective]
            raise ValueError(
                f"names {unread[0]}, but train.objective {objective} reads {supported}: name its columns"
            )
        self._required: dict[str, str] = {}
        self._optional: dict[str, str] = {}
        self._named = set(named.values())
        for shape in SHAPES_OF[objective]:
            required = SHAPES[shape]
            optional = OPTIONAL_FIELDS.get(shape, ())
            if named.keys().isdisjoint((*required, *optional)):
                continue
            if "prompt" in optional and "prompt" in named:
                # Without the prompt that the manifest names, another text would be taken for it.
                required += ("prompt",)
            for field in required:
                self._required[field] = named.get(field, field)
            for field in optional:
                self._optional[field] = named.get(field, field)

    def select(self, record: Fields) -> Fields:
        """Return a record's fields by their own names; raise InvalidRecord if it lacks a column."""
        if not self._required:
            return record
        fields = {
            field: _value(record, column) for field, column in self._required.items()
        }
        for field, value in fields.items():
            if value is _MISSING:
                has = ", ".join(map(str, record)) or "none"
                raise InvalidRecord(
                    f"has no column {shortened(self._required[field])} for {field}; its columns are {shortened(has)}"
                )
        for field, column in self._optional.items():
            value = _value(record, column)
            if value is not _MISSING:
                fields[field] = value
        return fields

    def problem(self, names: Iterable[str]) -> str:
        """Return the reason why a table with these columns cannot be read, or an empty text."""
        present = set(names)
        if not self._required:
            if complete_shapes(present, self._objective):
                return ""
            return f"needs the columns {SUPPORTED_SHAPES[self._objective]}"
        needed = {*self._required.values(), *self._named}
        for column in sorted(needed):
            # A dotted name may lead into an object. Only the records show whether the object has that field.
            if column not in present and _outermost(column) not in present:
                return f"has no column {shortened(column)}, which the manifest names under columns"
        return ""

    def among(self, names: Iterable[str]) -> list[str]:
        """Return the columns of a table that are read, in the table's order."""
        columns: AbstractSet[str] = {*self._required.values(), *self._optional.values()}
        if not columns:
            columns = fields_for(self._objective)
        outermost = {_outermost(column) for column in columns}
        wanted = columns | outermost
        return [name for name in names if name in wanted]


def _outermost(column: str) -> str:
    return column.partition(".")[0]


def _value(record: Fields, column: str) -> Any:
    # A column whose own name has dots comes before a field of an object.
    if column in record:
        return record[column]
    name, _, rest = column.partition(".")
    inner = record.get(name)
    if rest and isinstance(inner, dict):
        return _value(inner, rest)
    return _MISSING
