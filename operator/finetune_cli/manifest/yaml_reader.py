"""YAML with the line of everything, read as Kubernetes reads it.

This follows the Go library behind kubectl where PyYAML does not: 2e-4 is a number, 1:30 and 2024-01-01 are text,
y and n without quotes are true and false as yes, no, on and off are.
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
from finetune_cli.manifest import yaml_errors as syntax

LARGEST_FILE = 256 * 1024
DEEPEST = 64
MOST_NODES = 50_000
INTEGER_BITS = 64
TRUE, FALSE = {"y", "yes", "on", "true"}, {"n", "no", "off", "false"}

TAG = "tag:yaml.org,2002:"
MERGE = f"{TAG}merge"


@dataclass
class YamlNode:
    """A scalar, mapping or list, and where it stands."""

    line: int
    written: str
    """Its key as it was written, or [3] in a list."""
    data: "str | int | float | bool | dict[str, YamlNode] | list[YamlNode] | None"
    source: str = ""
    """A scalar as it was written, without quotes."""
    broken: bool = False
    """It, or in a whole document something in it, could not be read; that has been said."""

    def plain(self) -> Any:
        """Give the data alone."""
        match self.data:
            case dict():
                return {key: value.plain() for key, value in self.data.items()}
            case list():
                return [value.plain() for value in self.data]
            case _:
                return self.data

    def follow(self, path: tuple[str | int, ...]) -> "list[YamlNode]":
        """Give the values on the way along a path, as far as they exist, this one first."""
        found = [self]
        for step in path:
            match found[-1].data, step:
                case dict() as mapping, str() if step in mapping:
                    found.append(mapping[step])
                case list() as items, int() if step < len(items):
                    found.append(items[step])
                case _:
                    break
        return found


@dataclass
class YamlFile:
    """A file's documents and all that is wrong with it as YAML."""

    documents: list[YamlNode] = field(default_factory=list)
    diagnostics: list[Diagnostic] = field(default_factory=list)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  PyYAML's own way: the resolvers of a loader class
    depth = 0

    @override
    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        self.depth += 1
        if self.depth > DEEPEST:
            raise ComposerError(problem=f"nested more than {DEEPEST} levels deep", problem_mark=self.get_mark())
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


for _tag, _pattern, _first in (
    ("bool", r"y|Y|n|N|yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF", "yYnNtTfFoO"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(f"{TAG}{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))


def load(file: Path) -> YamlFile:
    """Read a file; whatever is wrong becomes a Problem, never an exception."""
    try:
        with file.open("rb") as stream:
            content = stream.read(LARGEST_FILE + 1)
    except IsADirectoryError:
        return YamlFile(diagnostics=[Diagnostic(file, None, "", "is a folder; name the manifest in it")])
    except FileNotFoundError:
        return YamlFile(diagnostics=[Diagnostic(file, None, "", "no such file; `finetune init` writes one")])
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        return YamlFile(diagnostics=[Diagnostic(file, None, "", f"cannot be read: {why}")])
    if len(content) > LARGEST_FILE:
        message = f"is larger than {LARGEST_FILE // 1024} KiB; a manifest is a few KiB, and kubectl apply takes no more"
        return YamlFile(diagnostics=[Diagnostic(file, None, "", message)])
    return parse(file, content)


def parse(file: Path, content: bytes) -> YamlFile:
    """Read a file's bytes into documents."""
    text = YamlFile()
    try:
        decoded = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = f"is not UTF-8: byte 0x{content[error.start]:02x}; save the file as UTF-8"
        text.diagnostics.append(Diagnostic(file, line, "", message))
        return text
    newlines = [found.start() for found in re.finditer("\n", decoded)]
    try:
        for node in _nodes(decoded):
            walk = _TreeBuilder(file, newlines)
            document = walk.value(node, "", walk.line(node), ())
            document.broken = bool(walk.problems)
            text.diagnostics += walk.problems
            if document.data is not None and not walk.stopped:
                text.documents.append(document)
    except yaml.YAMLError as error:
        text.diagnostics.append(syntax.problem(file, decoded, error))
    if not text.documents and not text.diagnostics:
        text.diagnostics.append(Diagnostic(file, 1, "", "is empty; `finetune init` writes a manifest to start from"))
    return text


def _nodes(text: str) -> Iterator[Node]:
    loader = _Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            if node is not None:
                yield node
    finally:
        loader.dispose()


class _TreeBuilder:
    """Turns one document's node graph into a tree; aliases are written out, within limits."""

    def __init__(self, file: Path, newlines: list[int]) -> None:
        self.file = file
        self.newlines = newlines
        self.problems: list[Diagnostic] = []
        self.left = MOST_NODES
        self.stopped = False

    def report(self, line: int, trail: tuple[str, ...], message: str) -> None:
        self.problems.append(Diagnostic(self.file, line, joined(trail), message))

    def line(self, node: Node) -> int:
        """Count as editors do; PyYAML's own count takes other characters for line ends as well."""
        return bisect(self.newlines, node.start_mark.index - 1) + 1

    def value(self, node: Node, written: str, line: int, trail: tuple[str, ...]) -> YamlNode:
        self.left -= 1
        if self.left < 0 or len(trail) > DEEPEST:
            self._stop(line, trail)
            return YamlNode(line, written, None, broken=True)
        match node:
            case MappingNode():
                return YamlNode(line, written, self._mapping(node, trail))
            case SequenceNode():
                return YamlNode(line, written, self._list(node, trail))
            case _:
                return self._scalar(node, written, line, trail)

    def _stop(self, line: int, trail: tuple[str, ...]) -> None:
        if self.stopped:
            return
        self.stopped, self.left = True, 0
        if len(trail) > DEEPEST:
            self.report(line, (), f"an alias contains itself, or lies more than {DEEPEST} levels deep")
        else:
            self.report(line, (), f"has more than {MOST_NODES:,} values, aliases written out")

    def _list(self, node: SequenceNode, trail: tuple[str, ...]) -> list[YamlNode]:
        items = []
        for index, item in enumerate(node.value):
            written = f"[{index}]"
            items.append(self.value(item, written, self.line(item), (*trail, written)))
        return items

    def _mapping(self, node: MappingNode, trail: tuple[str, ...]) -> dict[str, YamlNode]:
        own: dict[str, YamlNode] = {}
        merged: dict[str, YamlNode] = {}
        for key, content in node.value:
            line = self.line(key)
            if key.tag == MERGE:
                merged = self._merge(content, line, trail) | merged
            elif (name := self._key(key, line, trail)) is None:
                continue
            elif name in own:
                self.report(line, (*trail, name), f"is given twice, first in line {own[name].line}; keep one")
            else:
                own[name] = self.value(content, name, line, (*trail, name))
        return merged | own

    def _key(self, key: Node, line: int, trail: tuple[str, ...]) -> str | None:
        if not isinstance(key, ScalarNode):
            self.report(line, trail, "a key must be text; {{ }} of a template, or a list, cannot be one")
            return None
        if key.tag == f"{TAG}str":
            return str(key.value)
        shown = key.value or "nothing"
        self.report(line, trail, f'a key must be text: put quotes around it ("{shown}")')
        return None

    def _merge(self, content: Node, line: int, trail: tuple[str, ...]) -> dict[str, YamlNode]:
        parts = content.value if isinstance(content, SequenceNode) else [content]
        merged: dict[str, YamlNode] = {}
        for part in parts:
            if not isinstance(part, MappingNode):
                self.report(line, trail, "<< must be followed by an alias of a mapping, as in <<: *common")
                continue
            value = self.value(part, "<<", line, (*trail, "<<"))
            merged = (value.data if isinstance(value.data, dict) else {}) | merged
        return merged

    def _scalar(self, node: Node, written: str, line: int, trail: tuple[str, ...]) -> YamlNode:
        try:
            return YamlNode(line, written, _READERS.get(node.tag, _unknown)(node.value), source=node.value)
        except ValueError as error:
            self.report(line, trail, f"{error} (got {quoted(node.value)})")
            return YamlNode(line, written, None, broken=True)


def joined(trail: tuple[str, ...]) -> str:
    """Write a path: spec.train.args[3], and [key] for a key that holds dots or other marks."""
    text = ""
    for step in trail:
        if step.startswith("["):
            text += step
        elif re.fullmatch(r"[A-Za-z0-9_-]+", step):
            text += f".{step}" if text else step
        else:
            text += f"[{step}]" if step.isprintable() else f"[{step!a}]"
    return text


def _unknown(_: str) -> None:
    raise ValueError("has a tag (!…) that means nothing here; remove it")


def _text(value: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("half of a UTF-16 pair is not a character")
    return value


def _whole(value: str) -> int:
    digits = value.replace("_", "").lower()
    octal = re.fullmatch(r"([-+]?)0o?([0-7]+)", digits)
    try:
        number = int(octal[1] + octal[2], 8) if octal else int(digits, 0)
    except ValueError:
        raise ValueError("must be a whole number") from None
    if number.bit_length() >= INTEGER_BITS:
        raise ValueError(f"is larger than the {INTEGER_BITS} bits that Kubernetes keeps")
    return number


def _real(value: str) -> float:
    try:
        number = float(value.replace("_", ""))
    except ValueError:
        number = float("inf")
    if not abs(number) < float("inf"):
        raise ValueError("must be a finite number")
    return number


def _truth(value: str) -> bool:
    word = value.lower()
    if word not in TRUE | FALSE:
        raise ValueError("must be true or false")
    return word in TRUE


_READERS: dict[str, Callable[[str], str | int | float | bool | None]] = {
    f"{TAG}str": _text,
    MERGE: _text,
    f"{TAG}int": _whole,
    f"{TAG}float": _real,
    f"{TAG}bool": _truth,
    f"{TAG}null": lambda _: None,
}
