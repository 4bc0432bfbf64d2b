"""A small multiple-choice lm-eval task file and its data."""

from pathlib import Path
from typing import Any

from support.trainer.models import SENTENCES, write_jsonl

VERBS = ["opens", "closes", "returns", "ignores"]

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: questions/verbs.jsonl
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{sentence}}}}\\nVerb:"
doc_to_choice: {verbs}
doc_to_target: label
metric_list:
  - metric: acc
"""

CHOICE: dict[str, Any] = {
    "task": "quiz",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "quiz.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{q}}?",
    "doc_to_target": "label",
    "doc_to_choice": "choices",
    "metric_list": [{"metric": "acc"}],
}
"""A task with a choice of answers, whose records are in quiz.jsonl."""


def write_verbs_task(folder: Path, *, name: str = "verbs", questions: int = 40) -> Path:
    """Write the task file, and its questions at a path relative to it; return the path of the task file."""
    (folder / "questions").mkdir(parents=True, exist_ok=True)
    sentences = [
        SENTENCES[(7 * number) % len(SENTENCES)] for number in range(questions)
    ]
    write_jsonl(
        folder / "questions" / "verbs.jsonl",
        [
            {
                "sentence": text,
                "label": next(
                    index for index, verb in enumerate(VERBS) if verb in text
                ),
            }
            for text in sentences
        ],
    )
    path = folder / f"{name}.yaml"
    path.write_text(TASK.format(name=name, verbs=VERBS))
    return path
