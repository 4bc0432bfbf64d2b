"""Rendering and scoring of a task's first questions, before any model is loaded: a mistake in a task costs no GPU."""

import difflib
import re
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from finetune_trainer.evaluation.invented_answers import (
    SCORED,
    Results,
    score_invented_answers,
)
from finetune_trainer.evaluation.task_errors import unknown_metric, wrong_target
from finetune_trainer.evaluation.task_shapes import wrong_shape
from finetune_trainer.runtime.errors import ConfigInvalid

FIELD_NAMES = frozenset(
    {"answer", "input", "label", "output", "prompt", "question", "target", "text"}
)
"""Common names of fields, which are hardly the answer to all questions."""
FIELD_NAME = re.compile(r"[A-Za-z_]\w*")
# Each takes about a millisecond. A field that only some records lack is often missing in the first records already.
RENDERED = 32
"""Questions of each task that are rendered."""


def check_first_questions(
    task: Any, questions: Sequence[int], seed: int
) -> Results | None:
    """Render the first questions as lm-eval does, without a chat template, and score invented answers to them.

    Return lm-eval's results, or None for a task that is a class of its own. Raise ConfigInvalid for a mistake that
    lm-eval accepts, and for a task that cannot be scored. Other errors of lm-eval are raised as they are.
    """
    problem = (
        wrong_shape(task.config)
        or unknown_metric(task)
        or _missing_examples(task)
        or _unknown_field(task)
    )
    if problem:
        raise ConfigInvalid(problem)
    task.set_fewshot_seed(seed=seed)
    # Each access to it may process all documents again.
    documents = task.eval_docs
    requests = []
    for index in questions[:RENDERED]:
        question = documents[index]
        requests.append((question, _render(task, question, index)))
        problem = wrong_target(task, question)
        if problem:
            raise ConfigInvalid(f"question {index + 1}: {problem}")
    if not isinstance(task, ConfigurableTask):
        return None
    if task.OUTPUT_TYPE == "generate_until":
        # Importing what generates takes seconds, which other tasks do not need.
        from finetune_trainer.evaluation.generation_check import (  # noqa: PLC0415
            check_generation,
        )

        check_generation(task.get_config("generation_kwargs"))
    return score_invented_answers(task, requests[:SCORED])


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
        # Any other word may be meant as the answer. No task asks the same word each time.
        if value not in fields and (is_likely or key == "doc_to_text"):
            return (
                f"{key}: {value} is no field of the data, so lm-eval would write this word for every question; "
                f"the fields are {', '.join(fields)}"
            )
    return ""


def _render(task: Any, question: Any, index: int) -> list[Instance]:
    context = task.fewshot_context(
        question,
        num_fewshot=task.get_config("num_fewshot") or 0,
        gen_prefix=task.doc_to_prefix(question),
    )
    metadata = (task.task_name, index, task.get_config("repeats"))
    requests = task.construct_requests(
        doc=question,
        ctx=context,
        metadata=metadata,
        apply_chat_template=False,
        chat_template=None,
    )
    return requests if isinstance(requests, list) else [requests]


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
