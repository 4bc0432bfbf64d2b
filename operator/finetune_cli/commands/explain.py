"""`finetune explain`: what a field of the manifest or a reason of the status means, without a cluster."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune_cli.commands import Commands
from finetune_cli.diagnostics import UsageError, closest_match, quoted
from finetune_operator.api.spec import PipelineSpec
from finetune_operator.crd.generate import spec_schema, status_schema

DESCRIPTION = """\
Explain a FIELD of the manifest or of the status, such as train.lora or status.stages, with its type, default and the
fields in it; or a REASON that `finetune get` or a condition shows, such as DataInvalid, with its fix. Without an
argument, the fields of the manifest.
"""
PAGE = "troubleshooting.md"
WIDTH = 100
"""Longest line; shorter on a narrower terminal."""
LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
Schema = dict[str, Any]


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "explain", help="explain a field or a reason", description=DESCRIPTION
    )
    parser.add_argument(
        "topic",
        nargs="?",
        default="spec",
        metavar="FIELD|REASON",
        help="what to look up",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the explanation; raises UsageError for a topic that is neither a field nor a reason."""
    explanation = explain_reason(arguments.topic)
    if explanation:
        print(explanation)
        return 0
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 0)).columns)
    for line in explain_field(arguments.topic, width):
        print(line)
    return 0


def explain_reason(topic: str) -> str | None:
    """Return the section, or the line of a table, that explains a reason; None for a field.

    Raises UsageError for an unknown reason.
    """
    # A field is no reason, so its explanation needs no page.
    if topic in {field.alias for field in PipelineSpec.model_fields.values()}:
        return None
    explanations = _explanations(LINK.sub(r"\1", _page()))
    for reason, explanation in explanations.items():
        if reason.lower() == topic.lower():
            return explanation
    # Reasons are written in CamelCase, and fields begin with a small letter.
    if not topic[:1].isupper():
        return None
    match = closest_match(topic, explanations)
    hint = f"did you mean {match}?" if match else f"known are {', '.join(explanations)}"
    raise UsageError(f"there is no reason {quoted(topic)}; {hint}")


def _page() -> str:
    """Return the troubleshooting guide: a part of an installed package, or a file of the clone."""
    installed = Path(__file__).parents[1] / PAGE
    clone = Path(__file__).parents[3] / "docs" / "guides" / PAGE
    return (installed if installed.is_file() else clone).read_text("utf-8")


def _explanations(page: str) -> dict[str, str]:
    """Return the text of each reason."""
    texts: dict[str, str] = {}
    # A heading of the second or third level ends a section.
    for section in re.split(r"^(?=###? )", page, flags=re.MULTILINE):
        heading, _, body = section.partition("\n")
        reason = heading.removeprefix("### ")
        if heading.startswith("### "):
            texts[reason] = f"{reason}\n\n{body.strip()}"
        else:
            texts |= dict(_rows(body))
    return texts


def _rows(body: str) -> Iterator[tuple[str, str]]:
    """Yield reason and text of the rows of a table, whose first cell has the reasons."""
    rows = re.findall(r"^\| (.+) \|$", body, flags=re.MULTILINE)
    titles = rows[0].split(" | ")[1:] if rows else []
    for row in rows:
        names, *cells = row.split(" | ")
        text = "\n".join(
            f"- {title}: {cell}" for title, cell in zip(titles, cells, strict=False)
        )
        for name in re.findall(r"`(\w+)`", names):
            yield name, f"{name}\n\n{text}"


def explain_field(path: str, width: int) -> Iterator[str]:
    """Yield the lines about a field; raises UsageError if there is none."""
    steps = re.sub(r"\[\d*\]", "", path).split(".")
    if steps[0] not in {"spec", "status"}:
        steps = ["spec", *steps]
    schema = {"spec": spec_schema, "status": status_schema}[steps[0]]()
    for index, step in enumerate(steps[1:], start=1):
        schema = _child(schema, step, ".".join(steps[:index]))
    yield f"{'.'.join(steps)} <{_type(schema)}>{_default(schema)}"
    yield ""
    yield from _wrapped(schema.get("description", ""), width, "  ")
    yield from _values(schema, width)
    fields = _fields(schema)
    if fields:
        yield ""
        yield "FIELDS"
    for name, field in fields.items():
        is_required = name in _object(schema).get("required", ())
        yield f"  {name} <{_type(field)}>{_default(field)}{', required' if is_required else ''}"
        first, *_ = re.split(r"(?<=[.])\s", field.get("description", ""))
        yield from _wrapped(first, width, "      ")


def _object(schema: Schema) -> Schema:
    """Return the schema of the objects in a list, or the schema itself."""
    items: Schema = schema.get("items", schema)
    return items


def _fields(schema: Schema) -> dict[str, Schema]:
    fields: dict[str, Schema] = _object(schema).get("properties", {})
    return fields


def _child(schema: Schema, step: str, parent: str) -> Schema:
    fields = _fields(schema)
    if step in fields:
        return fields[step]
    if not fields:
        raise UsageError(f"{parent} has no fields that are known here")
    match = closest_match(step, fields)
    hint = f"did you mean {match}?" if match else f"it has {', '.join(fields)}"
    raise UsageError(f"{parent} has no field {quoted(step)}; {hint}")


def _type(schema: Schema) -> str:
    if "x-kubernetes-int-or-string" in schema:
        return "integer or string"
    kind = str(schema.get("type", "object"))
    if kind == "array":
        return f"list of {_type(schema['items'])}"
    values = schema.get("additionalProperties")
    if isinstance(values, dict) and "type" in values:
        return f"map of {_type(values)}"
    return kind


def _default(schema: Schema) -> str:
    default = schema.get("default")
    # Defaults of objects are the defaults of their fields.
    if default is None or isinstance(default, (dict, list)):
        return ""
    return f", default {str(default).lower() if isinstance(default, bool) else default}"


def _values(schema: Schema, width: int) -> Iterator[str]:
    """Yield the values that a field may have."""
    allowed = _object(schema).get("enum")
    if allowed:
        yield from _wrapped(f"One of: {', '.join(map(str, allowed))}.", width, "  ")
    for keyword, text in (("minimum", "At least"), ("maximum", "At most")):
        if keyword in schema:
            yield f"  {text} {schema[keyword]}."


def _wrapped(text: str, width: int, indent: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        yield from textwrap.wrap(
            " ".join(paragraph.split()),
            width,
            initial_indent=indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
        )
