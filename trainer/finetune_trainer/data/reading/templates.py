"""Templates that write a field from several columns, such as {{ instruction }} and {{ input }}."""

import json
import re
from typing import Any

from jinja2 import StrictUndefined, TemplateError, UndefinedError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

from finetune_trainer.data.records.records import (
    Fields,
    InvalidRecord,
    kind_of,
    shortened,
)

RECORD = "record"
"""The variable with all columns, for names that are no identifiers: {{ record["body text"] }}."""
# In YAML, only double quotes turn \n into a line break. LaTeX has commands such as \nabla.
_WRITTEN_BREAK = re.compile(r"\\n(?![a-z])")


def is_template(column: str) -> bool:
    """Return whether the value of a field of `columns` is a template, and not a name."""
    return "{{" in column or "{%" in column


class ColumnTemplate:
    """A sandboxed Jinja template over the columns of a record; raises ValueError if it is not valid."""

    def __init__(self, field: str, source: str) -> None:
        self._field = field
        if _WRITTEN_BREAK.search(source):
            raise ValueError(
                f"{field} has the two characters \\n: write it in double quotes, so that YAML reads a line break"
            )
        try:
            tree = _ENVIRONMENT.parse(source)
            self._template = _ENVIRONMENT.from_string(source)
        except TemplateError as error:
            raise ValueError(f"{field} is no template of Jinja: {error}") from None
        self.names = _names_in(tree)
        """The columns that it reads; None: it may read all."""
        self.cut = _cut_names(tree)
        """The columns of which it may write a part only, so that a single word counts as a text, too."""

    def text(self, record: Fields) -> str:
        """Return the text of a record; raise InvalidRecord if it lacks a column, or if a column holds no text."""
        try:
            return self._template.render({RECORD: record, **record})
        except UndefinedError as error:
            has = shortened(", ".join(map(str, record)) or "none")
            raise InvalidRecord(
                f"the template of {self._field}: {shortened(str(error))}; the columns are {has}; for a column that "
                "may be absent write {{ name | default('') }}"
            ) from None
        except InvalidRecord:
            raise
        except Exception as error:  # noqa: BLE001  a template is a program, and may fail in any way
            raise InvalidRecord(
                f"the template of {self._field} failed: {shortened(str(error))}"
            ) from None


def _written(value: Any) -> Any:
    """Return what a template writes for a value: nothing for null; raise InvalidRecord for a list or an object."""
    if value is None:
        return ""
    if isinstance(value, list | dict):
        # Python's notation of a list is no text to learn.
        raise InvalidRecord(
            f"a template writes {kind_of(value)}: choose a text in it, or write {{{{ name | tojson }}}}"
        )
    return value


def _names_in(tree: nodes.Template) -> frozenset[str] | None:
    names = meta.find_undeclared_variables(tree)
    if RECORD not in names:
        return frozenset(names)
    uses = sum(name.name == RECORD for name in tree.find_all(nodes.Name))
    looked_up = _looked_up(tree)
    if len(looked_up) < uses:
        return None
    return frozenset((names - {RECORD}) | set(looked_up))


def _cut_names(tree: nodes.Template) -> frozenset[str]:
    cuts: list[nodes.Node] = [
        item for item in tree.find_all(nodes.Filter) if item.name == "truncate"
    ]
    cuts += [
        item
        for item in tree.find_all(nodes.Getitem)
        if isinstance(item.arg, nodes.Slice)
    ]
    names: set[str] = set()
    for cut in cuts:
        names.update(name.name for name in cut.find_all(nodes.Name))
        names.update(_looked_up(cut))
    return frozenset(names)


def _looked_up(tree: nodes.Node) -> list[str]:
    """Return the columns that are looked up in `record` by their names."""
    names = [
        item.arg.value
        for item in tree.find_all(nodes.Getitem)
        if _is_record(item.node) and isinstance(item.arg, nodes.Const)
    ]
    names += [
        item.attr for item in tree.find_all(nodes.Getattr) if _is_record(item.node)
    ]
    return names


def _is_record(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == RECORD


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox in which a template cannot make a short text so long that it fills the memory."""

    intercepted_binops = frozenset({"*", "**", "%"})

    @override
    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        raise SecurityError(f"the operator {operator} is not available")


def _as_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter writes \u0027 for an apostrophe, as for a web page.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _environment() -> _Sandbox:
    environment = _Sandbox(
        undefined=StrictUndefined,
        finalize=_written,
        # A line break at the end of a prompt is part of the prompt.
        keep_trailing_newline=True,
    )
    # A column may be called range or dict.
    environment.globals.clear()
    # The same data must give the same rows, in every process.
    del environment.filters["random"]
    environment.filters["tojson"] = _as_json
    return environment


_ENVIRONMENT = _environment()
