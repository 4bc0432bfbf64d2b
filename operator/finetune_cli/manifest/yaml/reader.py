"""Reads YAML into a tree of values with their lines, as Kubernetes reads it.

If PyYAML differs, it follows the Go library behind kubectl. 2e-4 is a number; 1:30 and 2024-01-01 are strings.
Unquoted y and n are true and false, as are yes, no, on and off.
"""

import re
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import override
from yaml.composer import ComposerError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from finetune_cli.diagnostics import Diagnostic, quoted
from finetune_cli.manifest.yaml import errors as yaml_errors
from finetune_cli.manifest.yaml.numbers import read_float, read_int

MAX_FILE_BYTES = 256 * 1024
"""`kubectl apply` stores the manifest in an annotation, and Kubernetes limits annotations to this size."""
# PyYAML and this reader are recursive: Python's stack must be deep enough.
MAX_DEPTH = 64
# Each alias may stand for many others, so that a few hundred bytes would fill the memory: an alias bomb.
MAX_NODES = 50_000
"""Values in a document with its aliases written out."""
# YAML 1.1, which the Go library reads. PyYAML knows all of these but y and n.
TRUE = {"y", "yes", "on", "true"}
FALSE = {"n", "no", "off", "false"}

TAG = "tag:yaml.org,2002:"
MERGE = f"{TAG}merge"
NUMBERS = frozenset({f"{TAG}int", f"{TAG}float"})

Location = tuple[str | int, ...]
"""Keys and indexes from the document's root, as in pydantic's errors."""


@dataclass
class YamlNode:
    """A scalar, mapping or list with its line."""

    line: int
    key: str
    """Its key as the file spells it, or [3] for an item of a list."""
    data: "str | int | float | bool | dict[str, YamlNode] | list[YamlNode] | None"
    source: str = ""
    """A scalar as the file spells it, without quotes."""
    broken: bool = False
    """This value, or for a document's root any value below it, could not be read; the error is reported already."""

    def plain(self) -> Any:
        """Return the data without lines, as plain dicts, lists and scalars."""
        match self.data:
            case dict():
                return {key: value.plain() for key, value in self.data.items()}
            case list():
                return [value.plain() for value in self.data]
            case _:
                return self.data

    def nearest(self, path: tuple[str | int, ...]) -> "YamlNode":
        """Return the value at the end of a path, or the last value on the way to it."""
        return self.follow(path)[-1]

    def follow(self, path: tuple[str | int, ...]) -> "list[YamlNode]":
        """Return the values along a path, as far as they exist, starting with this node."""
        nodes = [self]
        for step in path:
            match nodes[-1].data, step:
                case dict() as mapping, str() if step in mapping:
                    nodes.append(mapping[step])
                case list() as items, int() if step < len(items):
                    nodes.append(items[step])
                case _:
                    break
        return nodes


@dataclass
class YamlFile:
    """The documents of a file and its YAML errors."""

    documents: list[YamlNode] = field(default_factory=list)
    diagnostics: list[Diagnostic] = field(default_factory=list)


class LineLoader(yaml.SafeLoader):
    """A loader that takes a text for a number or for true or false where Kubernetes does."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  PyYAML keeps a loader's resolvers in the class
    depth = 0

    @override
    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        # Counted here, before PyYAML recurses: a RecursionError would have no line.
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ComposerError(
                problem=f"nested more than {MAX_DEPTH} levels deep",
                problem_mark=self.get_mark(),
            )
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


# In place of PyYAML's resolvers, which also read dates and numbers of base 60. The Go library does not.
for _tag, _pattern, _first in (
    (
        "bool",
        r"y|Y|n|N|yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF",
        "yYnNtTfFoO",
    ),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (
        "int",
        r"[-+]?(0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)",
        "-+0123456789",
    ),
    (
        "float",
        r"[-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("merge", r"<<", "<"),
):
    LineLoader.add_implicit_resolver(
        f"{TAG}{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first)
    )


def load(file: Path) -> YamlFile:
    """Read a file. Every error becomes a Diagnostic; none is raised."""
    try:
        with file.open("rb") as stream:
            # One byte more than allowed: a larger file is refused without reading all of it.
            content = stream.read(MAX_FILE_BYTES + 1)
    except IsADirectoryError:
        return _unreadable(file, "is a folder; give the manifest file in it")
    except FileNotFoundError:
        return _unreadable(file, "no such file; `finetune init` writes a manifest")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return _unreadable(file, f"cannot be read: {reason}")
    if len(content) > MAX_FILE_BYTES:
        limit = f"{MAX_FILE_BYTES // 1024} KiB, the limit of kubectl apply"
        return _unreadable(file, f"is larger than {limit}; a manifest has a few KiB")
    return parse(file, content)


def _unreadable(file: Path, message: str) -> YamlFile:
    return YamlFile(diagnostics=[Diagnostic(file, None, "", message)])


def parse(file: Path, content: bytes) -> YamlFile:
    """Parse the bytes of a file into documents."""
    result = YamlFile()
    try:
        # Editors on Windows may begin a file with a byte order mark.
        decoded = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = (
            f"is not UTF-8: byte 0x{content[error.start]:02x}; save the file as UTF-8"
        )
        result.diagnostics.append(Diagnostic(file, line, "", message))
        return result
    newlines = [match.start() for match in re.finditer("\n", decoded)]
    try:
        for node in _nodes(decoded):
            builder = _TreeBuilder(file, newlines)
            document = builder.value(node, "", builder.line(node), ())
            document.broken = bool(builder.diagnostics)
            result.diagnostics += builder.diagnostics
            if document.data is not None and not builder.stopped:
                result.documents.append(document)
    except yaml.YAMLError as error:
        # The documents before the error are kept: their own errors are reported, too.
        result.diagnostics.append(yaml_errors.diagnostic(file, decoded, error))
    if not result.documents and not result.diagnostics:
        message = "is empty; `finetune init` writes a manifest to start from"
        result.diagnostics.append(Diagnostic(file, 1, "", message))
    return result


def _nodes(text: str) -> Iterator[Node]:
    loader = LineLoader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            if node is not None:
                yield node
    finally:
        loader.dispose()


class _TreeBuilder:
    """A converter of one document's node graph into a tree; aliases are written out, up to MAX_NODES and MAX_DEPTH."""

    def __init__(self, file: Path, newlines: list[int]) -> None:
        self.file = file
        self.newlines = newlines
        self.diagnostics: list[Diagnostic] = []
        self.nodes_left = MAX_NODES
        self.stopped = False

    def report(self, line: int, path: tuple[str, ...], message: str) -> None:
        self.diagnostics.append(Diagnostic(self.file, line, join_path(path), message))

    def line(self, node: Node) -> int:
        """Return the line as editors count it; PyYAML also counts other characters, such as U+2028, as line ends."""
        return bisect(self.newlines, node.start_mark.index - 1) + 1

    def value(self, node: Node, key: str, line: int, path: tuple[str, ...]) -> YamlNode:
        self.nodes_left -= 1
        if self.nodes_left < 0 or len(path) > MAX_DEPTH:
            self._stop(line, path)
            return YamlNode(line, key, None, broken=True)
        match node:
            case MappingNode():
                data = self._mapping(node, path)
                if node.value and not data:
                    # None of its keys could be read: a template, for example.
                    return YamlNode(line, key, None, broken=True)
                return YamlNode(line, key, data)
            case SequenceNode():
                return YamlNode(line, key, self._list(node, path))
            case _:
                return self._scalar(node, key, line, path)

    def _stop(self, line: int, path: tuple[str, ...]) -> None:
        # Only the first: an alias bomb would have thousands of errors.
        if self.stopped:
            return
        self.stopped = True
        self.nodes_left = 0
        message = f"has more than {MAX_NODES:,} values with its aliases written out"
        if len(path) > MAX_DEPTH:
            message = f"an alias contains itself or is nested more than {MAX_DEPTH} levels deep"
        self.report(line, (), message)

    def _list(self, node: SequenceNode, path: tuple[str, ...]) -> list[YamlNode]:
        items = []
        for index, item in enumerate(node.value):
            key = f"[{index}]"
            line = self.line(item)
            items.append(self.value(item, key, line, (*path, key)))
        return items

    def _mapping(self, node: MappingNode, path: tuple[str, ...]) -> dict[str, YamlNode]:
        own: dict[str, YamlNode] = {}
        merged: dict[str, YamlNode] = {}
        for key, content in node.value:
            line = self.line(key)
            if key.tag == MERGE:
                # An earlier << takes precedence.
                merged = self._merge(content, line, path) | merged
                continue
            if own and _has_no_colon(key, content):
                # epochs: 1,000 in braces has a second key 000, and the value before it is not what was meant.
                last, previous = list(own.items())[-1]
                self._report_comma(key, line, (*path, last))
                previous.data = None
                previous.broken = True
                continue
            name = self._key(key, line, path)
            if name is None:
                continue
            if name in own:
                message = f"is given twice, first in line {own[name].line}; keep one"
                self.report(line, (*path, name), message)
            else:
                own[name] = self.value(content, name, line, (*path, name))
        return merged | own

    def _report_comma(self, key: Node, line: int, path: tuple[str, ...]) -> None:
        message = "a comma ends a value: put a list in [ ], and a text in quotes"
        if key.tag in NUMBERS:
            message = "a comma ends a value: write numbers without commas"
        self.report(line, path, message)

    def _key(self, key: Node, line: int, path: tuple[str, ...]) -> str | None:
        """Return a key as a string; None with an error for any other key."""
        if not isinstance(key, ScalarNode):
            # Templates of Helm and Go are mappings to a YAML parser.
            message = "a key must be a string; a list or the {{ }} of a template cannot be a key"
            self.report(line, path, message)
            return None
        if key.tag == f"{TAG}str":
            return str(key.value)
        shown = key.value or "nothing"
        self.report(line, path, f'a key must be a string; put it in quotes: "{shown}"')
        return None

    def _merge(
        self, content: Node, line: int, path: tuple[str, ...]
    ) -> dict[str, YamlNode]:
        parts = [content]
        if isinstance(content, SequenceNode):
            parts = content.value
        merged: dict[str, YamlNode] = {}
        for part in parts:
            if not isinstance(part, MappingNode):
                self.report(
                    line, path, "<< needs an alias of a mapping, as in <<: *common"
                )
                continue
            value = self.value(part, "<<", line, (*path, "<<"))
            # Not a mapping if it was too deep or too large.
            if isinstance(value.data, dict):
                merged = value.data | merged
        return merged

    def _scalar(
        self, node: Node, key: str, line: int, path: tuple[str, ...]
    ) -> YamlNode:
        read = _READERS.get(node.tag, _reject_tag)
        try:
            data = read(node.value)
        except ValueError as error:
            self.report(line, path, f"{error} (got {quoted(node.value)})")
            return YamlNode(line, key, None, broken=True)
        return YamlNode(line, key, data, source=node.value)


def _has_no_colon(key: Node, content: Node) -> bool:
    """Return whether a key in braces is a word after a comma, and not a key with an empty value."""
    if not isinstance(key, ScalarNode) or not isinstance(content, ScalarNode):
        return False
    is_one_word = not re.search(r"[\s:]", key.value)
    ends_together = content.end_mark.index == key.end_mark.index
    return is_one_word and ends_together


def join_path(path: tuple[str, ...]) -> str:
    """Return a path such as spec.train.args[3]; a key with dots or other marks becomes [key]."""
    text = ""
    for step in path:
        if step.startswith("["):
            text += step
        elif re.fullmatch(r"[A-Za-z0-9_-]+", step):
            if text:
                text += "."
            text += step
        elif step.isprintable():
            text += f"[{step}]"
        else:
            text += f"[{step!a}]"
    return text


def _reject_tag(_: str) -> None:
    raise ValueError("has a tag (!…), which is not supported; remove it")


def _read_string(value: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(
            "holds half of a UTF-16 surrogate pair, which is not a character"
        )
    return value


def _read_bool(value: str) -> bool:
    lower = value.lower()
    if lower not in TRUE | FALSE:
        raise ValueError("must be true or false")
    return lower in TRUE


_READERS: dict[str, Callable[[str], str | int | float | bool | None]] = {
    f"{TAG}str": _read_string,
    MERGE: _read_string,
    f"{TAG}int": read_int,
    f"{TAG}float": read_float,
    f"{TAG}bool": _read_bool,
    f"{TAG}null": lambda _: None,
}
