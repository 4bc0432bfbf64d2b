"""Check the text of a chat template without rendering it. The command line and `prepare` share this module."""

import inspect
import json
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

from finetune_trainer.contract.chat_template import RESERVED_ARGUMENTS, is_jinja

# The largest known template has 20 kB. A larger file may be weights or data.
MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 500
"""Functions that may call each other; a macro takes five."""
OTHER_FILES = (nodes.Extends, nodes.FromImport, nodes.Import, nodes.Include)
"""Statements that read other templates. A chat template is a single file."""


class TemplateInvalid(ValueError):
    """A text that cannot be a chat template; the message has the line, or the reason for all of it."""


class _Generation(Extension):
    """Reads {% generation %} as transformers does; it marks what the assistant wrote."""

    tags = {"generation"}  # noqa: RUF012  Jinja declares it so

    @override
    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)


def read_template(file: Path) -> str:
    """Return the text of a template's file. Raise TemplateInvalid if it is no template, and OSError."""
    if not file.is_file():
        raise TemplateInvalid("is not a file; name the file with the template")
    size = file.stat().st_size
    if size > MAX_FILE_BYTES:
        raise TemplateInvalid(
            f"has {size:,} bytes, and a template at most {MAX_FILE_BYTES:,}"
        )
    try:
        # An editor may have put a byte order mark before the text.
        text = file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TemplateInvalid(
            f"is not UTF-8: {error.reason} at byte {error.start}; save it as UTF-8"
        ) from None
    if not is_jinja(text):
        raise TemplateInvalid("has neither {{ nor {%, so it is no Jinja template")
    if _is_json(text):
        raise TemplateInvalid("is JSON; name a file that has the template's text alone")
    return text


def _is_json(text: str) -> bool:
    """Return whether a text is JSON, such as tokenizer_config.json, which has the template as a value."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    # Transformers adds both functions, so they are no variables.
    environment.globals.update(raise_exception=None, strftime_now=None)
    return environment


@contextmanager
def depth_limit() -> Iterator[None]:
    """Limit the functions that the block calls inside each other to MAX_DEPTH."""
    before = sys.getrecursionlimit()
    # PyTorch's compiler raises the limit so far that the stack overflows before Python notices.
    sys.setrecursionlimit(min(before, len(inspect.stack(0)) + MAX_DEPTH))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def variables_of(template: str) -> frozenset[str]:
    """Return the names of the variables that a chat template reads.

    Raise TemplateInvalid if it is no Jinja, or if it needs what the sandbox of transformers refuses.
    """
    environment = _environment()
    try:
        with depth_limit():
            tree = environment.parse(template)
            _check_tree(tree)
            return frozenset(meta.find_undeclared_variables(tree))
    except TemplateSyntaxError as error:
        raise TemplateInvalid(f"line {error.lineno}: {error.message}") from None
    except RecursionError:
        raise TemplateInvalid("its statements are nested too deeply") from None


def _check_tree(tree: nodes.Template) -> None:
    for other in tree.find_all(OTHER_FILES):
        raise TemplateInvalid(
            f"line {other.lineno}: reads another template: a chat template is a single file"
        )
    for attribute in tree.find_all(nodes.Getattr):
        if attribute.attr.startswith("_"):
            raise TemplateInvalid(
                f"line {attribute.lineno}: reads {attribute.attr}: attributes that begin with _ are refused"
            )
    for node in tree.find_all((nodes.Filter, nodes.Call)):
        source = _random_source(node)
        if source:
            raise TemplateInvalid(
                f"line {node.lineno}: {source} writes another text each time, "
                "so that a server would not write what was learned: write a fixed text"
            )


def _random_source(node: nodes.Node) -> str:
    """Return Jinja's name for what a node takes by chance; empty if nothing is random."""
    match node:
        case nodes.Filter(name="random"):
            return "the filter random"
        case nodes.Filter(name="map", args=[nodes.Const(value="random"), *_]):
            return "the filter random"
        # Without a seed, Jinja writes placeholder text of random words.
        case nodes.Call(node=nodes.Name(name="lipsum")):
            return "lipsum()"
        case _:
            return ""


def unread_arguments(
    arguments: Collection[str], variables: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield each argument that is none of a template's variables, with the message about it."""
    known = ", ".join(sorted(set(variables) - RESERVED_ARGUMENTS)) or "no argument"
    for name in sorted(set(arguments) - set(variables)):
        yield name, f"the chat template does not read it; it reads {known}"


def with_defaults(template: str, arguments: Mapping[str, Any]) -> str:
    """Return the template with the arguments as defaults of its variables, one a line before its own first line."""
    lines = []
    for name, value in sorted(arguments.items()):
        # Jinja reads the escapes of JSON, but no pairs of surrogates: other characters stay as they are.
        literal = json.dumps(value, ensure_ascii=False)
        lines.append(
            f"{{%- if {name} is not defined %}}{{%- set {name} = {literal} %}}{{%- endif %}}\n"
        )
    # The line break, and no minus sign: Jinja drops exactly this break, and leaves the template's first spaces alone.
    return "".join(lines) + template
