"""Check what a machine can check of STYLE.md; print `file:line: problem` and exit with 1 if there is any."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from checkout import tracked
from code_forms import (
    CONDITIONAL,
    WALRUS,
    Function,
    comments,
    complexity,
    forms_in,
    functions_in,
)

ROOT = Path(__file__).resolve().parents[1]
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
MARKDOWN_COLUMNS = 100
TEST_NAME_LENGTH = 60
SENTENCE_WORDS = 25
FILE_LINES = 400
FOLDER_FILES = 18
COMPLEXITY = 15
PRODUCT = ("operator/", "trainer/")

PRONOUNS = re.compile(r"\b(that|those) of\b", re.IGNORECASE)

BANNED_FIRST_WORDS = frozenset(
    {"give", "gives", "say", "says", "tell", "tells", "have", "has", "let", "lets"}
)
BANNED_WORDS = {
    "(?:some|any|no|every)body": "name the actor",
    "(?:someone|who[e]ver)": "name the actor",
    "pantry": "image store",
    "errands?": "background request",
    "nats": "loss sum",
    "foretell": "forecast",
    "last words": "termination message",
}
# Forms of code_forms.py that stay, with the reason.
FORM_EXCEPTIONS = {
    (
        "operator/finetune_cli/forecast/forecast.py",
        "vague name 'why'",
    ): "a field of the JSON that `finetune plan -o json` prints",
}
CLASS_EXCEPTIONS = {
    "Pipeline": "the user's word for it in Python, beside the operator's own record",
}
# Folders of the product that may have more than FOLDER_FILES files, with the reason.
FOLDER_EXCEPTIONS = {
    "operator/finetune_cli/commands": "a file for each command, found by the command's name",
    "trainer/finetune_trainer/contract": "a file for each block of the contract",
}
TEXT = (".py", ".md", ".yaml", ".yml", ".toml", ".tpl", ".txt")
EXCEPTIONS = {
    ".ci/check_style.py": "names the banned words",
    "STYLE.md": "names the banned words",
    "docs/adr/0030-count-ideas-not-lines.md": "names the banned words",
    "charts/finetune-operator/templates/crds.yaml": "generated from the models, which are checked",
    "crds/finetunepipelines.yaml": "generated from the models, which are checked",
}


def main() -> int:
    """Return 1 if a file breaks a rule, else 0. A new file is checked before it is committed."""
    paths = [str(path.relative_to(ROOT)) for path in tracked(ROOT)]
    names = [name for name in paths if name not in EXCEPTIONS]
    problems = [problem for name in names for problem in problems_of(name)]
    problems += repeated_classes(names)
    problems += full_folders(names)
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print("style: ok")
    return int(bool(problems))


def problems_of(name: str) -> Iterator[str]:
    """Yield every problem of one file."""
    path = ROOT / name
    if path.suffix not in TEXT:
        return
    for line, problem in problems_in(name, path.read_text()):
        yield f"{name}:{line}: {problem}"


def problems_in(name: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield line and description of every problem in a text."""
    yield from banned_words(text)
    if name.endswith(".md"):
        yield from long_lines(text)
        yield from pronouns(1, text)
    if name.endswith(".py"):
        tree = ast.parse(text)
        yield from code_problems(tree)
        yield from dense_forms(name, tree)
        lines = len(text.splitlines())
        if lines > FILE_LINES:
            yield 1, f"the file has {lines} lines, more than {FILE_LINES}"
        for line, comment in comments(text):
            yield from pronouns(line, comment)


def pronouns(start: int, text: str) -> Iterator[tuple[int, str]]:
    """Yield each pronoun that a reader would have to resolve; `start` is the line of the text."""
    for match in PRONOUNS.finditer(text):
        yield (
            start + text.count("\n", 0, match.start()),
            f"'{match[0]}': repeat the noun",
        )


def dense_forms(name: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the forms that pack several ideas into a line, and functions with too many branches."""
    for line, form in forms_in(tree):
        # A short conditional expression is fine, and a single `:=` may be.
        if form not in {CONDITIONAL, WALRUS} and (name, form) not in FORM_EXCEPTIONS:
            yield line, f"{form}: one idea a line"
    for function in functions_in(tree):
        walruses = sum(isinstance(node, ast.NamedExpr) for node in ast.walk(function))
        if walruses > 1:
            yield (
                function.lineno,
                f"{function.name} has {walruses} `:=`: assign first, then test",
            )
        branches = complexity(function)
        if branches > COMPLEXITY:
            yield (
                function.lineno,
                f"{function.name} has the complexity {branches}, over {COMPLEXITY}",
            )


def repeated_classes(names: list[str]) -> Iterator[str]:
    """Yield classes of the product that have the name of another class."""
    places: dict[str, list[str]] = {}
    for name in names:
        if name.startswith(PRODUCT) and name.endswith(".py"):
            for node in ast.parse((ROOT / name).read_text()).body:
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(name)
    for class_name, files in places.items():
        if len(files) > 1 and class_name not in CLASS_EXCEPTIONS:
            yield f"{files[0]}: the class {class_name} is also in {', '.join(files[1:])}"


def full_folders(names: list[str]) -> Iterator[str]:
    """Yield folders of the product with too many files beside each other."""
    modules = [name for name in names if name.startswith(PRODUCT)]
    folders = Counter(
        str(Path(name).parent) for name in modules if name.endswith(".py")
    )
    for folder, files in folders.items():
        if files > FOLDER_FILES and folder not in FOLDER_EXCEPTIONS:
            yield (
                f"{folder}: {files} files, more than {FOLDER_FILES}: sort them into folders by kind"
            )


def banned_words(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and problem for each banned word."""
    for pattern, advice in BANNED_WORDS.items():
        for match in re.finditer(rf"(?<![\w-]){pattern}(?![\w-])", text, re.IGNORECASE):
            yield text.count("\n", 0, match.start()) + 1, f"'{match[0]}': {advice}"


def long_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines of prose that are too long; tables, code blocks and a line that is one long link may be longer."""
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        prose = (
            not in_code
            and not line.lstrip().startswith(("|", "```", "<img", "!["))
            and " " in line.strip()
        )
        if prose and len(line) > MARKDOWN_COLUMNS:
            yield number, f"{len(line)} characters, more than {MARKDOWN_COLUMNS}"


def code_problems(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield problems of docstrings, also of attributes, and of test names."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(ast.Constant(str(text))):
                yield from pronouns(node.lineno, text)
            case _:
                pass
        if (
            isinstance(node, Function)
            and node.name.startswith("test_")
            and len(node.name) > TEST_NAME_LENGTH
        ):
            yield (
                node.lineno,
                f"the test's name has {len(node.name)} characters, more than {TEST_NAME_LENGTH}",
            )
        if isinstance(node, Documented):
            yield from docstring_problems(node)


def docstring_problems(node: Documented) -> Iterator[tuple[int, str]]:
    """Yield problems of one docstring: its first word, and the length of its first sentence."""
    line = 1 if isinstance(node, ast.Module) else node.lineno
    name = "this module" if isinstance(node, ast.Module) else node.name
    words = re.split(
        r"(?<=[.!?:])\s|\n\s*\n", ast.get_docstring(node) or "", maxsplit=1
    )[0].split()
    if words and words[0].lower().strip(".,:`") in BANNED_FIRST_WORDS:
        yield line, f"the docstring of {name} starts with {words[0]}"
    if len(words) > SENTENCE_WORDS:
        yield (
            line,
            f"the first sentence of {name} has {len(words)} words, more than {SENTENCE_WORDS}",
        )


if __name__ == "__main__":
    sys.exit(main())
