"""The columns that a manifest names for the fields of its records, as names or as templates."""

from collections.abc import Collection
from functools import cached_property
from typing import Any

from finetune_trainer.contract import Objective
from finetune_trainer.data.reading.templates import ColumnTemplate, is_template
from finetune_trainer.data.records.forms import FORMS, form_of
from finetune_trainer.data.records.records import (
    SUPPORTED_SHAPES,
    Fields,
    InvalidRecord,
    shortened,
)
from finetune_trainer.data.records.suggestions import similar_name, variable

_SHARED = "system"
"""A field of two kinds, which chooses neither of them beside another field."""
# Not None: a column with a null is something else than a missing column.
_MISSING = object()


def _kinds(objective: Objective) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the required and the other fields of each form whose columns a manifest may name."""
    return [
        (form.required, form.named)
        for form in FORMS[objective]
        if form.named is not None
    ]


class NamedColumns:
    """Reads the fields of a single kind of records: each from the column that the manifest names, or from its own name.

    Raises ValueError if the manifest names a column for a field that the objective does not read, or a template that
    is not valid.
    """

    def __init__(self, named: dict[str, str], objective: Objective) -> None:
        kinds = _kinds(objective)
        known = {name for required, optional in kinds for name in required + optional}
        unread = sorted(named.keys() - known)
        if unread:
            supported = SUPPORTED_SHAPES[objective]
            raise ValueError(
                f"names {unread[0]}, but train.objective {objective} reads {supported}: name its columns"
            )
        for field in ("messages", "tools"):
            if is_template(named.get(field, "")):
                raise ValueError(
                    f"{field} has a template, but a template writes text: name the column with the list"
                )
        self._templates = {
            field: ColumnTemplate(field, column)
            for field, column in named.items()
            if is_template(column)
        }
        self._required: dict[str, str] = {}
        self._optional: dict[str, str] = {}
        for required, optional in kinds:
            own = {*required, *optional} - {_SHARED}
            if not own.isdisjoint(named):
                self._add_kind(required, optional, named)
        if _SHARED in named and not self._required:
            # Two kinds have it: alone it belongs to messages.
            self._add_kind(*kinds[0], named)
        self._asked_for = named.keys() | self._required.keys()
        read = self._read_columns()
        form = form_of(self._required, objective)
        extras = frozenset(form.optional) if form else frozenset[str]()
        # A column that is one of the fields already has no second meaning.
        self._extras = extras - (read or frozenset()) - named.keys()
        self.reads = None if read is None else read | self._extras
        """The columns that are read; None: a template may read all."""

    def _add_kind(
        self, required: tuple[str, ...], optional: tuple[str, ...], named: Fields
    ) -> None:
        """Add the fields of a kind of records."""
        if "prompt" in optional and "prompt" in named:
            # Without the prompt that the manifest names, another text would be taken for it.
            required += ("prompt",)
        for field in required:
            self._required[field] = named.get(field, field)
        for field in optional:
            self._optional[field] = named.get(field, field)

    def _read_columns(self) -> frozenset[str] | None:
        columns: set[str] = set()
        for field, column in self._fields():
            names = self._names_of(field, column)
            if names is None:
                return None
            columns |= names
        return frozenset(columns)

    @cached_property
    def whole(self) -> frozenset[str]:
        """The columns that a field has whole, and not only in a template."""
        plain = {
            column for field, column in self._fields() if field not in self._templates
        }
        return frozenset(plain | self._extras)

    @property
    def cut(self) -> frozenset[str]:
        """The columns of which a template may write a part only."""
        cuts = [template.cut for template in self._templates.values()]
        return frozenset[str]().union(*cuts)

    @property
    def has_templates(self) -> bool:
        """Whether any field has a template."""
        return bool(self._templates)

    def _fields(self) -> list[tuple[str, str]]:
        """Return the fields, each with its column or template."""
        return [*self._required.items(), *self._optional.items()]

    def _names_of(self, field: str, column: str) -> frozenset[str] | None:
        template = self._templates.get(field)
        return template.names if template else frozenset((column,))

    def fields(self, record: Fields) -> Fields:
        """Return a record's fields by their own names; raise InvalidRecord if it lacks a column."""
        fields = {
            field: self._value(record, field, column)
            for field, column in self._required.items()
        }
        for field, value in fields.items():
            if value is _MISSING:
                raise InvalidRecord(_missing(self._required[field], field, record))
        for field, column in self._optional.items():
            if field not in fields:
                fields[field] = self._value(record, field, column)
        for column in self._extras:
            if column in record:
                fields[column] = record[column]
        return {
            field: value for field, value in fields.items() if value is not _MISSING
        }

    def _value(self, record: Fields, field: str, column: str) -> Any:
        template = self._templates.get(field)
        return template.text(record) if template else _value(record, column)

    def others(self, entry: str) -> str:
        """Return the other entries of `columns` that the manifest has, to write behind one entry."""
        field, _, _ = entry.partition(":")
        return "".join(
            f", {name}: {self._required[name]}"
            for name in self._required
            if name != field and name not in self._templates
        )

    def written(self, field: str) -> str:
        """Return the template of a field; for a field with a column, a template that writes it."""
        column = self._required.get(field, field)
        if field in self._templates:
            return column.replace("\n", "\\n")
        return f"{{{{ {variable(column)} }}}}"

    def problem(self, names: Collection[str]) -> str:
        """Return the reason why a table with these columns cannot be read, or an empty text."""
        present = set(names)
        for field, column in self._fields():
            if field not in self._asked_for:
                continue
            for needed in sorted(self._names_of(field, column) or ()):
                # A dotted name may lead into an object. Only the records show whether the object has that field.
                if needed not in present and outermost(needed) not in present:
                    has = shortened(", ".join(map(str, names)))
                    return (
                        f"has no column {shortened(needed)}, which the manifest names under columns; it has {has}"
                        f"{similar_name(needed, present)}"
                    )
        return ""


def outermost(column: str) -> str:
    """Return the name of the column in which a dotted name begins."""
    return column.partition(".")[0]


def _missing(column: str, field: str, record: Fields) -> str:
    has = ", ".join(map(str, record)) or "none"
    return (
        f"has no column {shortened(column)} for {field}; its columns are {shortened(has)}"
        f"{similar_name(column, record)}"
    )


def _value(record: Fields, column: str) -> Any:
    # A column whose own name has dots comes before a field of an object.
    if column in record:
        return record[column]
    name, _, rest = column.partition(".")
    inner = record.get(name)
    if rest and isinstance(inner, dict):
        return _value(inner, rest)
    return _MISSING
