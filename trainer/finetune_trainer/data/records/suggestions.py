"""Reasons why a record has no form that is read, with the line of the manifest that would read it."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches

from finetune_trainer.contract import Objective
from finetune_trainer.data.records.records import (
    SHAPES,
    SUPPORTED_SHAPES,
    shapes_of,
    shortened,
)

QUESTIONS = (
    *("instruction", "question", "query", "prompt", "problem", "user", "human"),
    *("inputs", "source", "article", "q"),
)
"""Names of columns that people give to what is asked."""
CONTEXTS = ("context", "passage", "document", "input")
"""Names of columns with more of what is asked."""
ANSWERS = (
    "output",
    "response",
    "answer",
    "completion",
    "solution",
    "target",
    "assistant",
    "summary",
    "targets",
    "highlights",
    "bot",
    "a",
)
"""Names of columns with what is to be learned."""
SYSTEMS = ("system_prompt", "system_message", "system")
"""Names of columns with a system message; the last that a record has is read."""
OTHER_TOOLS = {
    "segments": "write the texts of segments as prompt and completion, of which the completion is learned, or as text",
    "input_ids": "write the texts of which input_ids are the tokens: prepare tokenizes them itself",
}
"""Columns of records for other tools -> the fix."""
LISTS_OF_MESSAGES = ("turns", "dialog", "dialogue", "chat", "chat_history", "dialogs")
"""Names of a column with a conversation."""
LISTS_OF_RECORDS = ("data", "records", "rows", "examples", "train")
"""Names of a list with all records."""


def similar_name(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean NAME?` for the most similar of the names, or an empty text."""
    similar = _most_similar(name, names)
    return f"; did you mean {shortened(similar)}?" if similar else ""


def renamed(field: str, names: Iterable[str]) -> str:
    """Return the line of the manifest that reads a field from the column with the most similar name, or no text."""
    similar = _most_similar(field, names)
    return f": write columns: {{{field}: {similar}}}" if similar else ""


def answered(names: Iterable[str]) -> str:
    """Return the line of the manifest that reads the completion from a column with an answer, or no text."""
    by_lower = {str(name).lower(): str(name) for name in names}
    for answer in ANSWERS:
        if answer in by_lower:
            return f": write columns: {{completion: {by_lower[answer]}}}"
    return ""


def _most_similar(name: str, names: Iterable[str]) -> str:
    by_lower = {str(known).lower(): str(known) for known in names}
    matches = get_close_matches(name.lower(), by_lower, n=1, cutoff=0.75)
    return by_lower[matches[0]] if matches else ""


def needed_columns(objective: Objective, names: Collection[str]) -> str:
    """Return the reason why a table or a record with these columns has no form of the objective, and a fix."""
    has = ", ".join(sorted(map(str, names)))
    shown = shortened(has) if has else "nothing"
    reason = f"needs {SUPPORTED_SHAPES[objective]}; it has {shown}"
    fix = _fix(objective, [str(name) for name in names])
    return f"{reason}: {fix}" if fix else reason


def _fix(objective: Objective, names: list[str]) -> str:
    present = set(names)
    if objective == "SFT" and present >= {"preferred_output", "non_preferred_output"}:
        return "set train.objective to DPO"
    if objective == "DPO" and present >= {"prompt", "completion"}:
        return "set train.objective to SFT, or add chosen and rejected"
    for name, fix in OTHER_TOOLS.items():
        if name in present:
            return fix
    columns = _misspelt(objective, names)
    if not columns and objective == "SFT":
        columns = _question_and_answer(names)
    if columns:
        return f"write columns: {{{columns}}} in the data set of the manifest"
    return _list_fix(present)


def _list_fix(names: Collection[str]) -> str:
    """Return the fix for a column that may be a list of messages or of records, or an empty text."""
    for name in LISTS_OF_MESSAGES:
        if name in names:
            return (
                f"if {name} is a list of messages, write columns: {{messages: {name}}}"
            )
    for name in LISTS_OF_RECORDS:
        if name in names:
            return (
                f"if {name} is the list of records, write this list alone into the file"
            )
    return ""


def _misspelt(objective: Objective, names: list[str]) -> str:
    """Return the entries of `columns` for names that are nearly the names of a shape, or an empty text."""
    by_lower = {name.lower(): name for name in names}
    for shape in shapes_of(objective):
        entries = []
        for field in SHAPES[shape].required:
            matches = get_close_matches(field, by_lower, n=1, cutoff=0.8)
            if matches:
                entries.append(f"{field}: {by_lower[matches[0]]}")
        if len(entries) == len(SHAPES[shape].required):
            return ", ".join(entries)
    return ""


def _question_and_answer(names: list[str]) -> str:
    """Return the entries of `columns` that make a conversation of a question and its answer, or an empty text."""
    by_lower = {name.lower(): name for name in names}
    answers = [by_lower[name] for name in ANSWERS if name in by_lower]
    asked = [by_lower[name] for name in (*QUESTIONS, *CONTEXTS) if name in by_lower]
    if not answers or not asked:
        return ""
    columns = {"instruction": asked[0], "output": answers[0]}
    if len(asked) > 1:
        columns["input"] = asked[1]
    for name in SYSTEMS:
        if name in by_lower:
            columns["system"] = by_lower[name]
    return ", ".join(
        f"{field}: {column}" for field, column in columns.items() if field != column
    )


def variable(column: str) -> str:
    """Return the expression of a column in a template."""
    is_path = all(part.isidentifier() for part in column.split("."))
    return column if is_path else f"record['{shortened(column)}']"
