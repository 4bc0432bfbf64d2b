"""Check what a machine can check of STYLE.md; prints `file:line: problem` and exits 1 where it finds any."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
MARKDOWN_COLUMNS = 100
TEST_NAME_LENGTH = 60
SENTENCE_WORDS = 25

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
TEXT = (".py", ".md", ".yaml", ".yml", ".toml", ".tpl", ".txt")
EXCEPTIONS = {
    ".ci/check_style.py": "names the banned words",
    "STYLE.md": "names the banned words",
    "charts/finetune-operator/templates/crds.yaml": "generated from the models, which are checked",
    "crds/finetunepipelines.yaml": "generated from the models, which are checked",
}


def main() -> int:
    """Return 1 where a file breaks a rule, else 0. A new file is checked before it is committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    found = [
        problem
        for name in names.stdout.splitlines()
        if name not in EXCEPTIONS
        for problem in problems_of(name)
    ]
    print("\n".join(found) or "style: ok", file=sys.stderr if found else sys.stdout)
    return int(bool(found))


def problems_of(name: str) -> Iterator[str]:
    """Yield every problem of one file."""
    path = ROOT / name
    if path.suffix not in TEXT or not path.is_file():
        return
    text = path.read_text()
    yield from (f"{name}:{line}: {problem}" for line, problem in banned_words(text))
    if path.suffix == ".md":
        yield from (f"{name}:{line}: {problem}" for line, problem in long_lines(text))
    if path.suffix == ".py":
        yield from (f"{name}:{line}: {problem}" for line, problem in code_problems(ast.parse(text)))


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
    """Yield problems of docstrings and of test names."""
    for node in ast.walk(tree):
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
    words = re.split(r"(?<=[.!?:])\s|\n\s*\n", ast.get_docstring(node) or "", maxsplit=1)[0].split()
    if words and words[0].lower().strip(".,:`") in BANNED_FIRST_WORDS:
        yield line, f"the docstring of {name} starts with {words[0]}"
    if len(words) > SENTENCE_WORDS:
        yield (
            line,
            f"the first sentence of {name} has {len(words)} words, more than {SENTENCE_WORDS}",
        )


if __name__ == "__main__":
    sys.exit(main())
