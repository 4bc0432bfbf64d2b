"""Messages for PyYAML's errors."""

import re
from pathlib import Path

import yaml
from yaml.error import Mark
from yaml.reader import ReaderError

from finetune_cli.diagnostics import Diagnostic

# Pattern over PyYAML's "context: problem", the message for it, and whether to report the first line of the construct
# instead of the line at which parsing failed. The first pattern that matches wins.
_MESSAGES: tuple[tuple[str, str, bool], ...] = (
    (r"found character '\\t'", "a tab; YAML is indented with spaces only", False),
    (
        r"found character '(.)' that cannot start",
        r"a value cannot begin with \1; put it in quotes",
        False,
    ),
    (
        r"mapping values are not allowed",
        "a second ': ' in one value; put the text in quotes, or fix the indentation",
        False,
    ),
    (r"could not find expected ':'", "a key without ': ' after it", True),
    (
        r"quoted scalar: found unexpected (end of stream|document)",
        "this quote is never closed",
        True,
    ),
    (r"expected ',' or '\]', but got '<stream end>'", "this [ is never closed", True),
    (r"expected ',' or '}', but got '<stream end>'", "this { is never closed", True),
    # Before the next pattern, which matches the same and says less.
    (
        r"expected ',' or '.', but got ':'",
        "a second ': ' in one value; put the text in quotes, or add a comma before the key",
        False,
    ),
    (
        r"expected ',' or '(.)', but got (.*)",
        r"expected a comma or \1, found \2; close the bracket before it, or put the text in quotes",
        False,
    ),
    (
        r"expected <block end>, but found '([\]},])'",
        r"a \1 without its opening bracket",
        False,
    ),
    (
        r"expected <block end>, but found '<scalar>'",
        "text after a complete value",
        False,
    ),
    (
        r"expected <block end>",
        "indented differently from the lines it belongs to",
        False,
    ),
    (
        r"sequence entries are not allowed",
        "a list must begin on the line after its key",
        False,
    ),
    (
        r"found undefined alias '(.*)'",
        r"*\1 refers to &\1, which is not defined before it",
        False,
    ),
    (r"found duplicate anchor '(.*)'; .*", r"&\1 is defined twice", False),
    (
        r"unknown escape character '(.*)'",
        r"\\\1 is not an escape in double quotes; write \\\\ or use single quotes",
        False,
    ),
    (
        r"expected '<document start>'",
        "text after the end of a document; begin the next one with ---",
        False,
    ),
)


def diagnostic(file: Path, text: str, error: yaml.YAMLError) -> Diagnostic:
    """Return the diagnostic for a file that is not YAML, with its line."""
    if isinstance(error, ReaderError):
        message = (
            f"character U+{int(error.character):04X} is not allowed in YAML; remove it"
        )
        return Diagnostic(file, _line(text, error.position), "", message)
    if not isinstance(error, yaml.MarkedYAMLError):
        return Diagnostic(file, None, "", f"is not YAML: {error}")
    detail = f"{error.context or ''}: {error.problem or ''}".removeprefix(": ")
    mark = error.problem_mark
    bracket = _unclosed_before(text, error)
    if bracket:
        detail = f"expected ',' or '{bracket}', but got '<stream end>'"
    for pattern, template, at_start in _MESSAGES:
        match = re.search(pattern, detail, re.DOTALL)
        if match:
            if at_start and error.context_mark:
                mark = error.context_mark
            detail = match.expand(template)
            break
    return Diagnostic(file, _line_of_mark(text, mark), "", f"not YAML: {detail}")


def _unclosed_before(text: str, error: yaml.MarkedYAMLError) -> str:
    """Return the bracket that is missing in an earlier line: the error is at the key that begins this line."""
    start = error.context_mark
    mark = error.problem_mark
    pattern = r"expected ',' or '(.)', but got '(:|<scalar>)'"
    expected = re.match(pattern, error.problem or "")
    if not expected or start is None or mark is None:
        return ""
    # Only a bracket that an earlier line has opened can end before this line.
    if start.line == mark.line:
        return ""
    before = text[: mark.index].rpartition("\n")[2]
    if re.fullmatch(r"\s*(- )?[\w.-]*", before) is None:
        return ""
    return expected[1]


def _line_of_mark(text: str, mark: Mark | None) -> int:
    if mark is None:
        return 1
    # Not mark.line: PyYAML also counts U+0085, U+2028 and U+2029 as ends of lines.
    return _line(text, mark.index)


def _line(text: str, index: int) -> int:
    """Return the line, counted as editors do; the end of the text belongs to its last line."""
    before = text[: min(index, len(text.rstrip("\r\n")))]
    return before.count("\n") + 1
