"""The docstrings of a model's fields, read from its source when a schema is asked for.

Pydantic's `use_attribute_docstrings` reads them at every import, which takes 0.3 s of CPU in each command and process.
"""

import ast
import inspect
import textwrap
from functools import cache

from pydantic import BaseModel


def field_docs(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring of each field that has one, also of inherited fields, by the field's name."""
    docs: dict[str, str] = {}
    # From the base to the model: a field that is declared again keeps its docstring unless it has a new one.
    for kind in reversed(model.__mro__):
        if issubclass(kind, BaseModel) and kind is not BaseModel:
            docs |= _own_docs(kind)
    return {name: text for name, text in docs.items() if name in model.model_fields}


# A schema of the whole API asks for the same classes again and again.
@cache
def _own_docs(kind: type) -> dict[str, str]:
    try:
        source = inspect.getsource(kind)
    except OSError:
        # A class of an interactive session has no source.
        return {}
    [definition] = ast.parse(textwrap.dedent(source)).body
    docs: dict[str, str] = {}
    if not isinstance(definition, ast.ClassDef):
        return docs
    name = ""
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(
            statement.target, ast.Name
        ):
            name = statement.target.id
            continue
        value = statement.value if isinstance(statement, ast.Expr) else None
        if name and isinstance(value, ast.Constant) and isinstance(value.value, str):
            docs[name] = inspect.cleandoc(value.value)
        name = ""
    return docs
