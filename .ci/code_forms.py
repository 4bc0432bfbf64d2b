"""The forms that pack several ideas into one line, as they are found in a syntax tree.

`check_style.py` refuses most of them, `measure_style.py` counts them all.
"""

import ast
import io
import tokenize
from collections.abc import Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef
BRANCHES = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.IfExp,
    ast.match_case,
)
VAGUE_NAMES = frozenset(
    {"each", "one", "ones", "found", "told", "why", "what", "whose"}
)

WALRUS = "assignment expression"
CONDITIONAL = "conditional expression"
NESTED = "nested conditional expression"
NEXT_DEFAULT = "next(generator, default)"
TUPLE = "tuple-to-tuple assignment"
VAGUE = "vague name"


def forms_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of each such form in a tree."""
    for node in ast.walk(tree):
        match node:
            case ast.NamedExpr():
                yield node.lineno, WALRUS
            case ast.IfExp():
                yield node.lineno, CONDITIONAL
                if any(isinstance(part, ast.IfExp) for part in descendants(node)):
                    yield node.lineno, NESTED
            case ast.Call(func=ast.Name("next"), args=[ast.GeneratorExp(), _]):
                yield node.lineno, NEXT_DEFAULT
            case ast.Assign(targets=[ast.Tuple()], value=ast.Tuple()) if not is_swap(
                node
            ):
                yield node.lineno, TUPLE
            case ast.Name(name, ast.Store()) if name in VAGUE_NAMES:
                yield node.lineno, f"{VAGUE} '{name}'"
            case ast.arg(name) if name in VAGUE_NAMES:
                yield node.lineno, f"{VAGUE} '{name}'"


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each comment of a file."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def descendants(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes below a node."""
    for child in ast.iter_child_nodes(node):
        yield from ast.walk(child)


def is_swap(node: ast.Assign) -> bool:
    """Return whether an assignment exchanges names, which needs both at once: `a, b = b, a + b`."""
    targets = {
        part.id for part in ast.walk(node.targets[0]) if isinstance(part, ast.Name)
    }
    values = {part.id for part in ast.walk(node.value) if isinstance(part, ast.Name)}
    return bool(targets & values)


def functions_in(tree: ast.AST) -> Iterator[Function]:
    """Yield all functions and methods."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def complexity(function: Function) -> int:
    """Return McCabe's number, with each `and`, `or` and comprehension as a branch.

    Source: McCabe, A Complexity Measure (1976): one more than the number of decisions.
    """
    nodes = list(ast.walk(function))
    branches = sum(isinstance(node, BRANCHES) for node in nodes)
    operators = sum(
        len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp)
    )
    loops = [node for node in nodes if isinstance(node, ast.comprehension)]
    return 1 + branches + operators + len(loops) + sum(len(loop.ifs) for loop in loops)
