"""Measure how dense the code and the prose are, and print one Markdown table for each kind.

`python .ci/measure_style.py` measures this checkout, `… FOLDER` another one. docs/adr/0030 says which figures are aimed
at. Everything is counted from syntax trees and words, so that two trees compare however their lines are wrapped.
"""

import ast
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from checkout import tracked
from code_forms import (
    CONDITIONAL,
    NESTED,
    NEXT_DEFAULT,
    TUPLE,
    VAGUE,
    WALRUS,
    Function,
    comments,
    complexity,
    forms_in,
    functions_in,
)

AREAS = {
    "operator": "operator/finetune_operator",
    "command line": "operator/finetune_cli",
    "trainer": "trainer",
    "testcluster": "testcluster",
    "bench": "bench",
    "e2e": "e2e",
    "tests": "tests",
}
PROSE = ("*.md", "docs/**/*.md", "testcluster/*.md")
GENERATED = frozenset(
    {"docs/reference/api.md", "docs/reference/cli.md", "docs/reference/measurements.md"}
)
Documented = ast.Module | ast.ClassDef | Function

THAT_OF = re.compile(r"\b(that|those) (of|that)\b", re.IGNORECASE)
WHERE = re.compile(r"\bwhere\b", re.IGNORECASE)
# "Where" is right before a place: "continue where it stopped", "say where the model is".
PLACE = re.compile(
    r"\b(continues?|continued|resumes?|know|knows|says?|see|decides?|shows?|from|places?|tell|find|finds|look|asks?|"
    r"and|or|is|are|be) where\b|\bwhere to\b",
    re.IGNORECASE,
)
PRONOUN = re.compile(r"\bones?\b", re.IGNORECASE)
NOUN_CLAUSE = re.compile(r"\bwhat (is|are|was|were|an?)\b", re.IGNORECASE)
RELATIVE = re.compile(r"\bof which\b|\bwhose\b", re.IGNORECASE)
ADDRESS = re.compile(r"\byours?\b|\byou\b", re.IGNORECASE)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FEW_LINES = 3
"""Lines of a short body."""


@dataclass
class Code:
    """The counts of one area."""

    files: list[int] = field(default_factory=list)
    """Lines of each file."""
    functions: list[int] = field(default_factory=list)
    """Lines of each function's body, without docstring, blank lines and comments."""
    complexities: list[int] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)
    code_lines: int = 0
    comments: int = 0
    body_lines: int = 0
    nodes: int = 0
    statements: int = 0
    forms: Counter[str] = field(default_factory=Counter)
    docstrings: list[str] = field(default_factory=list)


def main(arguments: list[str]) -> int:
    """Print the tables of the checkout in the folder of the first argument, by default this one."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parents[1]
    areas = {name: measure_code(root, folder) for name, folder in AREAS.items()}
    print_table("Sizes", SIZES, {name: sizes(code) for name, code in areas.items()})
    print_table(
        "Density", DENSITY, {name: density(code) for name, code in areas.items()}
    )
    prose = {name: words_of(code.docstrings) for name, code in areas.items()}
    prose["documents"] = words_of(documents(root))
    print_table(
        "In a thousand words",
        tuple(prose["documents"]),
        {k: v.values() for k, v in prose.items()},
    )
    print_table("Folders", FOLDERS, dict(folders(root)))
    return 0


SIZES = (
    "files",
    "lines",
    "file median",
    "file max",
    "function median",
    "p99",
    "max",
    "complexity p95",
    "max",
    "parameters p95",
    "max",
    "bodies ≤ 3 lines, %",
)
DENSITY = (
    "AST nodes a line",
    "AST nodes a statement",
    "`:=`",
    "conditional expressions",
    "nested ones",
    "`next(generator, default)`",
    "tuple-to-tuple",
    "comprehensions",
    "lambdas",
    "names `one`, `each`, `found`, `told`, `why`, `what`",
    "`#` in 100 lines",
)
COMPREHENSION = "comprehension"
LAMBDA = "lambda"
FORMS = (WALRUS, CONDITIONAL, NESTED, NEXT_DEFAULT, TUPLE, COMPREHENSION, LAMBDA)
FOLDERS = ("files", "imports among them", "floors", "cycles")


def sizes(code: Code) -> list[object]:
    """Return the row of one area in the table of sizes."""
    functions = sorted(code.functions)
    complexities = sorted(code.complexities)
    parameters = sorted(code.parameters)
    short = sum(lines <= FEW_LINES for lines in functions)
    return [
        len(code.files),
        sum(code.files),
        statistics.median(code.files),
        max(code.files),
        statistics.median(functions),
        percentile(functions, 99),
        functions[-1],
        percentile(complexities, 95),
        complexities[-1],
        percentile(parameters, 95),
        parameters[-1],
        round(100 * short / len(functions)),
    ]


def density(code: Code) -> list[object]:
    """Return the row of one area in the table of densities; forms are counted in a thousand lines of code."""
    forms = [round(1000 * code.forms[form] / code.code_lines, 1) for form in FORMS]
    return [
        round(code.nodes / code.body_lines, 1),
        round(code.nodes / code.statements, 1),
        *forms,
        sum(count for form, count in code.forms.items() if form.startswith(VAGUE)),
        round(100 * code.comments / code.code_lines, 1),
    ]


def percentile(values: list[int], percent: int) -> int:
    """Return the value below which so many percent of the sorted values are."""
    return values[min(len(values) * percent // 100, len(values) - 1)]


def measure_code(root: Path, folder: str) -> Code:
    """Return the counts of the Python files in a folder."""
    code = Code()
    for path in tracked(root, f"{folder}/*.py"):
        measure_file(path.read_text(), code)
    return code


def measure_file(text: str, code: Code) -> None:
    """Add the counts of one file."""
    tree = ast.parse(text)
    docstrings = docstring_nodes(tree)
    code.docstrings += [str(ast.get_docstring(node)) for node in docstrings]
    quiet = {line for node in docstrings for line in lines_of(node.body[0])}
    lines = code_lines(text) - quiet
    code.files.append(len(text.splitlines()))
    code.code_lines += len(lines)
    code.comments += sum(1 for _ in comments(text))
    code.forms.update(form for _, form in forms_in(tree))
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS):
            code.forms[COMPREHENSION] += 1
        elif isinstance(node, ast.Lambda):
            code.forms[LAMBDA] += 1
    for function in outer_functions(tree.body):
        nodes = [node for part in body_of(function) for node in ast.walk(part)]
        code.body_lines += body_lines(function, lines)
        code.nodes += len(nodes)
        code.statements += sum(isinstance(node, ast.stmt) for node in nodes)
    for function in functions_in(tree):
        code.functions.append(body_lines(function, lines))
        code.complexities.append(complexity(function))
        code.parameters.append(parameter_count(function))


def docstring_nodes(tree: ast.AST) -> list[Documented]:
    """Return the modules, classes and functions that have a docstring."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, Documented)]
    return [node for node in nodes if ast.get_docstring(node)]


def code_lines(text: str) -> set[int]:
    """Return the numbers of the lines that are neither blank nor a comment."""
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return {number for number, line in lines if line and not line.startswith("#")}


def body_of(function: Function) -> list[ast.stmt]:
    """Return the statements of a function without its docstring."""
    return function.body[1:] if ast.get_docstring(function) else function.body


def body_lines(function: Function, lines: set[int]) -> int:
    """Return how many of these lines the body of a function has."""
    return sum(len(lines.intersection(lines_of(part))) for part in body_of(function))


def parameter_count(function: Function) -> int:
    """Return how many parameters a function has, without `self` and `cls`."""
    arguments = function.args
    listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(argument.arg not in {"self", "cls"} for argument in listed)


def lines_of(node: ast.stmt) -> range:
    """Return the numbers of the lines of a statement."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def outer_functions(body: list[ast.stmt]) -> Iterator[Function]:
    """Yield functions and methods, but none that is inside another."""
    for node in body:
        if isinstance(node, Function):
            yield node
        elif isinstance(node, ast.ClassDef | ast.If | ast.Try | ast.With):
            yield from outer_functions(node.body)


def documents(root: Path) -> list[str]:
    """Return the prose of the documents that people write, without blocks of code."""
    paths = [
        path
        for path in tracked(root, *PROSE)
        if str(path.relative_to(root)) not in GENERATED
    ]
    return [
        re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        for path in paths
    ]


def words_of(texts: list[str]) -> dict[str, object]:
    """Return the row of one kind of text: words, then words to avoid in a thousand of them."""
    text = "\n".join(texts)
    words = len(text.split())

    def frequency(count: int) -> float:
        return round(1000 * count / max(words, 1), 2)

    where = len(WHERE.findall(text)) - len(PLACE.findall(text))
    return {
        "words": words,
        "that of, those of, those that": frequency(len(THAT_OF.findall(text))),
        "where for if": frequency(where),
        "what is, what a": frequency(len(NOUN_CLAUSE.findall(text))),
        "of which, whose": frequency(len(RELATIVE.findall(text))),
        "one, ones": frequency(len(PRONOUN.findall(text))),
        "you, your": frequency(len(ADDRESS.findall(text))),
    }


def folders(root: Path) -> Iterator[tuple[str, list[object]]]:
    """Yield each package of the product with six modules or more, and how its modules import each other."""
    for base in ("operator", "trainer"):
        packages = sorted({path.parent for path in tracked(root, f"{base}/*.py")})
        for package in packages:
            modules = {
                path.stem: path
                for path in package.glob("*.py")
                if path.stem != "__init__"
            }
            if len(modules) >= 6:  # noqa: PLR2004 -- smaller folders are read at a glance
                name = ".".join(package.relative_to(root / base).parts)
                yield name, room(name, modules)


def room(package: str, modules: dict[str, Path]) -> list[object]:
    """Return how many modules are in a folder, how many imports are among them, on how many floors, with cycles."""
    imports = {
        name: imported_siblings(path, package, modules.keys()) - {name}
        for name, path in modules.items()
    }
    floors: dict[str, int] = {}
    cycles = 0

    def floor(name: str, above: tuple[str, ...]) -> int:
        nonlocal cycles
        if name in above:
            cycles += 1
            return 0
        if name not in floors:
            floors[name] = 1 + max(
                (floor(below, (*above, name)) for below in imports[name]), default=0
            )
        return floors[name]

    for name in modules:
        floor(name, ())
    return [len(modules), sum(map(len, imports.values())), max(floors.values()), cycles]


def imported_siblings(path: Path, package: str, names: Iterator[str]) -> set[str]:
    """Return the modules of the same folder that a module imports."""
    siblings = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == package:
            siblings |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            siblings.add(node.module.removeprefix(f"{package}."))
    return siblings & set(names)


def print_table(title: str, columns: tuple[str, ...], rows: dict[str, object]) -> None:
    """Print a Markdown table with a row for each area."""
    print(f"\n| {title} | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    for name, values in rows.items():
        print(f"| {name} | {' | '.join(map(str, values))} |")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
