"""Rendering of a task's first questions, before any model is loaded: a mistake in a task costs no GPU."""

import difflib
import re
from collections.abc import Sequence
from typing import Any

from finetune_trainer.evaluation.task_errors import unknown_metric, wrong_target
from finetune_trainer.runtime.errors import ConfigInvalid

FIELD_NAMES = frozenset(
    {"answer", "input", "label", "output", "prompt", "question", "target", "text"}
)
"""Common names of fields, which are hardly the text of all questions."""
FIELD_NAME = re.compile(r"[A-Za-z_]\w*")
# Each takes about a millisecond. A field that only some records lack is often missing in the first records already.
RENDERED = 32
"""Questions of each task that are rendered."""


def check_first_questions(task: Any, questions: Sequence[int], seed: int) -> None:
    """Render the first questions as lm-eval does, without a chat template.

    Raise ConfigInvalid for a mistake that lm-eval accepts. Errors of lm-eval are raised as they are.
    """
    problem = unknown_metric(task) or _missing_examples(task) or _unknown_field(task)
    if problem:
        raise ConfigInvalid(problem)
    task.set_fewshot_seed(seed=seed)
    # Each access to it may process all documents again.
    documents = task.eval_docs
    for index in questions[:RENDERED]:
        question = documents[index]
        _render(task, question, index)
        problem = wrong_target(task, question)
        if problem:
            raise ConfigInvalid(f"question {index + 1}: {problem}")


def _unknown_field(task: Any) -> str:
    """Return the problem of a key that seems to name a field that the data lacks; empty without such a key.

    lm-eval takes a name that is no field for the text itself, so that all questions are this word.
    """
    keys = ["doc_to_text"]
    # The target of a choice may be the text of a choice, which `wrong_target` checks.
    if task.OUTPUT_TYPE != "multiple_choice":
        keys.append("doc_to_target")
    for key in keys:
        value = task.get_config(key)
        if not isinstance(value, str) or not FIELD_NAME.fullmatch(value):
            continue
        fields = list(task.features)
        is_likely = value in FIELD_NAMES or difflib.get_close_matches(value, fields, 1)
        # Any other word may be meant as the text.
        if value not in fields and is_likely:
            return (
                f"{key}: {value} is no field of the data, so lm-eval would write this word for every question; "
                f"the fields are {', '.join(fields)}"
            )
    return ""


def _render(task: Any, question: Any, index: int) -> None:
    context = task.fewshot_context(
        question,
        num_fewshot=task.get_config("num_fewshot") or 0,
        gen_prefix=task.doc_to_prefix(question),
    )
    metadata = (task.task_name, index, task.get_config("repeats"))
    task.construct_requests(
        doc=question,
        ctx=context,
        metadata=metadata,
        apply_chat_template=False,
        chat_template=None,
    )


def _missing_examples(task: Any) -> str:
    """Return the problem of a task that has fewer few-shot examples than it needs; empty if it has enough."""
    needed = task.get_config("num_fewshot") or 0
    sampler = getattr(task, "sampler", None)
    if not needed or sampler is None:
        return ""
    available = len(sampler.df)
    split = task.fewshot_cfg.split
    # A question is no example for itself.
    if split is not None and split == task.get_config("test_split"):
        available -= 1
    if needed <= available:
        return ""
    return (
        f"each question needs {needed} few-shot examples, but the data has {max(0, available)}; "
        "lower fewShot, or add examples to the split that fewshot_split names"
    )
