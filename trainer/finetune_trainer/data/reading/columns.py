"""Find a record's fields in the columns of a data set, and the texts in columns that nothing reads."""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

from finetune_trainer.contract import Columns, Objective, Unrendered
from finetune_trainer.data.reading.named_columns import NamedColumns, outermost
from finetune_trainer.data.reading.unread import (
    SYSTEM_COLUMNS,
    TEXT_COLUMNS,
    PartlyRead,
    cut_refusal,
    refusal,
    unread_columns,
    unread_words,
)
from finetune_trainer.data.records.forms import (
    CONVERSATION_COLUMNS,
    FORMS,
    Form,
    columns_for,
    description,
    form_of,
    is_plain,
)
from finetune_trainer.data.records.labels import (
    JUDGEMENTS,
    check_is_learned,
    decide,
    is_unknown_label,
)
from finetune_trainer.data.records.message_forms import unknown_roles
from finetune_trainer.data.records.records import Fields, InvalidRecord
from finetune_trainer.data.records.suggestions import needed_columns, variable
from finetune_trainer.data.records.unrendered import AnyCase

# A data set of objects with arbitrary keys must not fill the memory.
_MAX_PLANS = 1000
# As YAML writes it in double quotes.
_BLANK_LINE = "\\n\\n"
_LEADING = SYSTEM_COLUMNS | {"context", "passage", "system"}
"""Columns that stand before the question."""
_REASONING = frozenset({"reasoning", "reasoning_content", "thinking", "rationale"})
"""Columns with what the model is to think before it answers."""


_Columns = tuple[str, ...] | tuple[tuple[str, ...], frozenset[str]]
"""The names of a record's columns in their order; if any is null, a pair of them and of the columns that are null."""


class _Plan(NamedTuple):
    """How records with the same columns are read."""

    form: Form
    unread: tuple[str, ...]
    """Columns that the form does not read, in which a text would be lost."""
    decisions: frozenset[str]
    """Unread columns that may take a record out of the loss."""
    written: tuple[str, ...] = ()
    """Columns that only templates read, which may write a part of them."""
    labels: tuple[str, ...] = ()
    """Columns with a label of KTO, which decides whether a record is learned."""


class FieldColumns:
    """The columns in which a data set has the fields of its records.

    A manifest that names columns names the columns of a single shape: see `NamedColumns`, which may raise ValueError.
    Without them, the columns of each record show its form.
    """

    def __init__(
        self,
        columns: Columns | None = None,
        objective: Objective = "SFT",
        unrendered: Unrendered = "Refuse",
    ) -> None:
        self.notes: list[str] = []
        """New sentences for the log; the reader takes them out."""
        self.records_with_words = 0
        """Records with a single word in a column that nothing reads, which may be a label."""
        self._objective = objective
        self._allows_unread = unrendered == "Warn"
        self._ignored = frozenset(columns.ignored if columns else ())
        named = columns.named() if columns else {}
        self._named = NamedColumns(named, objective) if named else None
        self._whole_words = TEXT_COLUMNS.union(self._named.cut if self._named else ())
        self._may_be_plain = objective == "SFT" and not named
        self._plans: dict[_Columns, _Plan | None] = {}
        self._noted: set[str] = set()
        # A dict keeps the order of the columns.
        self._unread: dict[str, None] = {}
        self._lost: dict[str, None] = {}
        self._cut: dict[str, None] = {}
        self._words: Counter[str] = Counter()
        self._judged: set[str] = set()

    def restart(self) -> None:
        """Count from zero, before the records are read again."""
        self.records_with_words = 0
        self._words.clear()

    def select(self, record: Fields) -> Fields:
        """Return a record's fields by their own names.

        Raise InvalidRecord if the record has several forms, lacks a column, or has a text that nothing reads.
        """
        if self._may_be_plain and is_plain(record):
            return record
        source = self._source(record)
        plan = self._plan_of(source, record)
        if plan is None:
            # The formatter knows the shape of the other records, and so a better reason.
            return source
        fields = plan.form.convert(source)
        # Messages that are returned as they are have been looked at, and have known roles only.
        if fields.get("messages") is not source.get(plan.form.required[0]):
            self._note_roles(fields)
        if plan.written:
            fields = self._checked(record, fields, plan.written)
        if plan.labels:
            self._count_labels(source, plan.labels)
        if not plan.unread:
            return fields
        if plan.decisions:
            check_is_learned(record, plan.decisions)
        lost = unread_columns(record, plan.unread, fields)
        words = unread_words(record, plan.unread, fields)
        if words and not lost:
            self._words.update(words)
            self.records_with_words += 1
        return self._partly_read(plan.form, record, fields, lost) if lost else fields

    def _source(self, record: Fields) -> Fields:
        """Return the columns of a record that the manifest names or does not leave out, by their own names."""
        if self._named:
            return self._named.fields(record)
        if not self._ignored:
            return record
        # A form may read them, too, such as the label of KTO.
        return {
            name: value for name, value in record.items() if name not in self._ignored
        }

    def _plan_of(self, source: Fields, record: Fields) -> _Plan | None:
        """Return how records with these columns are read; raise InvalidRecord for several forms."""
        names = (*source, *record) if self._named else tuple(source)
        # A null is no value: it may be another column of this record that shows its form.
        key: _Columns = names
        if None in source.values():
            nulls = frozenset(name for name, value in source.items() if value is None)
            key = (names, nulls)
        try:
            return self._plans[key]
        except KeyError:
            plan = self._new_plan(source, record)
            self._keep(key, plan)
            return plan

    def _count_labels(self, source: Fields, labels: tuple[str, ...]) -> None:
        """Name the columns with an unknown label, and count the records with a word there: all are learned."""
        unknown = [name for name in labels if is_unknown_label(source[name])]
        words = [name for name in unknown if isinstance(source[name], str)]
        self._unread.update(dict.fromkeys(unknown))
        self._judged.update(unknown)
        if words:
            self._words.update(words)
            self.records_with_words += 1

    def _note_roles(self, fields: Fields) -> None:
        for role in unknown_roles(fields):
            self.note(
                f"the role {role} is none of system, user, assistant and tool, with which servers ask: "
                "it is written as it is"
            )

    def _checked(
        self, record: Fields, fields: Fields, written: tuple[str, ...]
    ) -> Fields:
        """Return fields of templates; raise InvalidRecord if these leave out a text, and that is not allowed."""
        cut = unread_columns(record, written, fields, self._whole_words, AnyCase)
        if not cut:
            return fields
        if not self._allows_unread:
            raise InvalidRecord(cut_refusal(cut))
        self._cut.update(dict.fromkeys(cut))
        return PartlyRead(fields)

    def _partly_read(
        self, form: Form, record: Fields, fields: Fields, lost: list[str]
    ) -> Fields:
        """Return fields beside columns with a text that is not read; raise InvalidRecord if that is not allowed."""
        if not self._allows_unread:
            texts = [name for name in lost if isinstance(record[name], str)]
            entry = self._system_entry(form, record, texts)
            if not entry:
                entry = self._template_with(form, fields, texts)
            others = self._named.others(entry) if self._named and entry else ""
            raise InvalidRecord(refusal(lost, entry + others))
        self._lost.update(dict.fromkeys(lost))
        return PartlyRead(fields)

    def _system_entry(self, form: Form, record: Fields, texts: list[str]) -> str:
        """Return the entries of `columns` that read a system message from its column, or an empty text."""
        if self._objective == "DPO" or "system" not in form.reads or "system" in record:
            return ""
        if len(texts) != 1 or texts[0] not in SYSTEM_COLUMNS:
            return ""
        entry = f"system: {texts[0]}"
        first = form.required[0]
        # Alone, it belongs to messages. The manifest's own entries are added to it.
        if self._named or first == "messages":
            return entry
        field = "messages" if first in CONVERSATION_COLUMNS else first
        return f"{entry}, {field}: {first}"

    def _template_with(self, form: Form, fields: Fields, texts: list[str]) -> str:
        """Return the entry of `columns` with a template that reads further columns, or an empty text."""
        if "messages" in fields or not texts:
            return ""
        targets: tuple[str, ...] = ("prompt", "text")
        if _REASONING.issuperset(texts) and "completion" in fields:
            # What the model is to write before its answer.
            targets = ("completion",)
        for field in targets:
            if field not in form.reads:
                continue
            before = [name for name in texts if name in _LEADING | _REASONING]
            behind = [name for name in texts if name not in before]
            parts = [f"{{{{ {variable(column)} }}}}" for column in before]
            if self._named:
                parts.append(self._named.written(field))
            elif field in fields:
                parts.append(f"{{{{ {field} }}}}")
            parts += [f"{{{{ {variable(column)} }}}}" for column in behind]
            return f'{field}: "{_BLANK_LINE.join(parts)}"'
        return ""

    def _keep(self, key: _Columns, plan: _Plan | None) -> None:
        if len(self._plans) == _MAX_PLANS:
            self._plans.clear()
        self._plans[key] = plan
        if plan:
            self._unread.update(dict.fromkeys(plan.unread))

    def _new_plan(self, source: Fields, record: Fields) -> _Plan | None:
        present = [name for name, value in source.items() if value is not None]
        form = form_of(present, self._objective)
        if form is None:
            return None
        text = description(form, source)
        if text:
            self.note(f"read as {text}")
        self._judged |= _switches(record)
        if not self._named:
            unread = [name for name in present if name not in form.reads]
            labels = tuple(sorted(form.labels.intersection(present)))
            return self._plan(form, unread)._replace(labels=labels)
        written = self._written(record)
        if self._named.reads is None:
            return self._plan(form, [], written)
        unread = [name for name in record if name not in self._named.reads]
        left = self._not_chosen(unread)
        if left:
            self.note(
                f"columns left out, as the manifest names others: {', '.join(left)}"
            )
        unread = [name for name in unread if name not in left]
        return self._plan(form, unread, written)

    def _plan(
        self, form: Form, unread: list[str], written: tuple[str, ...] = ()
    ) -> _Plan:
        unread = [name for name in unread if name not in self._ignored]
        return _Plan(form, tuple(unread), decide(unread), written)

    def _written(self, record: Fields) -> tuple[str, ...]:
        """Return the columns of a record that only templates read."""
        if not self._named or not self._named.has_templates:
            return ()
        others = self._named.whole | self._ignored
        reads = self._named.reads
        return tuple(
            name
            for name in record
            if name not in others and (reads is None or name in reads)
        )

    def _not_chosen(self, unread: list[str]) -> list[str]:
        """Return the columns of complete forms that the manifest did not choose."""
        left: set[str] = set()
        for form in FORMS[self._objective]:
            if set(form.required) <= set(unread):
                left |= form.reads
        return [name for name in unread if name in left]

    def note(self, text: str) -> None:
        """Add a sentence for the log, once."""
        if text not in self._noted:
            self._noted.add(text)
            self.notes.append(text)

    def add_final_notes(self) -> None:
        """Add sentences about the columns that were not read, when all records have been read."""
        labels = [name for name in self._unread if name not in self._lost]
        judged = [
            name
            for name in labels
            if str(name).lower() in JUDGEMENTS or name in self._judged
        ]
        if self._lost:
            names = ", ".join(self._lost)
            self.note(
                f"columns with a text that is not used, as prepare.unrendered allows: {names}"
            )
        if self._cut:
            names = ", ".join(self._cut)
            self.note(
                "columns of which a template writes a part only, "
                f"as prepare.unrendered allows: {names}"
            )
        if labels:
            names = ", ".join(map(self._described, labels))
            self.note(f"columns that are not read: {names}")
        if judged:
            self.note(
                f"{', '.join(judged)} may say which records are good, but every record is learned: "
                "remove the others from the file"
            )

    def _described(self, column: str) -> str:
        """Return the name of an unread column, and in how many records it holds a single word."""
        count = self._words[column]
        if not count:
            return str(column)
        records = "record" if count == 1 else "records"
        return f"{column} (a word in {count} {records})"

    def add_labels(self, names: Iterable[str]) -> None:
        """Add columns of a table that are not read for the log."""
        self._unread.update(dict.fromkeys(names))

    def problem(self, names: Collection[str]) -> str:
        """Return the reason why a table with these columns cannot be read, or an empty text."""
        if self._named:
            return self._named.problem(names)
        try:
            form = form_of(names, self._objective)
        except InvalidRecord:
            # Each record may have a value in the columns of a single form.
            return ""
        return "" if form else needed_columns(self._objective, names)

    def among(self, names: Iterable[str]) -> list[str]:
        """Return the columns of a table that are read, in the table's order."""
        wanted = self._named.reads if self._named else columns_for(self._objective)
        if wanted is None:
            return list(names)
        wanted = wanted | {outermost(column) for column in wanted}
        return [name for name in names if name in wanted]


def _switches(record: Fields) -> set[str]:
    """Return the columns of true and false, as far as this record shows."""
    return {name for name, value in record.items() if type(value) is bool}
