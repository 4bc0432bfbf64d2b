"""Mistakes in a task end the stage at its first attempt, before a model is loaded, and the message names the fix."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.trainer.evaluation import evaluate_config, evaluate_environment
from support.trainer.lm_eval_tasks import CHOICE
from support.trainer.models import write_jsonl
from support.trainer.stages import environment_in, run_to_failure

from finetune_trainer.contract import Environment, ExitCode, Task
from finetune_trainer.evaluation.tasks import load_tasks
from finetune_trainer.runtime.errors import StageError

pytestmark = pytest.mark.usefixtures("datasets_cache")

TEXT = CHOICE | {
    "output_type": "generate_until",
    "doc_to_choice": None,
    "doc_to_target": "{{label}}",
    "metric_list": [{"metric": "exact_match"}],
}


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return environment_in(tmp_path)


def questions(**changes: Any) -> list[dict[str, Any]]:
    answers = ["yes", "no"]
    records = [
        {"q": f"Is it {n}", "label": n % 2, "choices": answers} for n in range(6)
    ]
    # A later record differs: the first alone would not show the mistake.
    records[3] |= changes
    return records


def failure(
    environment: Environment,
    content: dict[str, Any] | str,
    records: list[dict[str, Any]] | None = None,
    **recipe: Any,
) -> StageError:
    folder = Path(str(environment.manifest_dir))
    write_jsonl(folder / "quiz.jsonl", questions() if records is None else records)
    if isinstance(content, dict):
        content = yaml.safe_dump(content)
    (folder / "quiz.yaml").write_text(content)
    task = Task(name="quiz", file="quiz.yaml", **recipe)
    with pytest.raises(StageError) as caught:
        load_tasks([task], environment, seed=0)
    assert str(caught.value).startswith("evaluate.tasks[quiz]: quiz.yaml: ")
    return caught.value


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"doc_to_text": "{{question}}"}, "doc_to_text cannot be written: "),
        ({"doc_to_text": "{{q"}, "doc_to_text cannot be written: "),
        ({"doc_to_text": "{{q.a.b}}"}, "doc_to_text cannot be written: "),
        ({"doc_to_text": "{{q | nope}}"}, "doc_to_text cannot be written: "),
        ({"doc_to_text": "{{[q, 'a'] | random}}"}, "No filter named 'random'"),
        ({"doc_to_text": None}, "doc_to_text is missing; the data has the fields q,"),
        ({"doc_to_text": "question"}, "doc_to_text: question is no field of the data"),
        ({"doc_to_text": "nowhere"}, "doc_to_text: nowhere is no field of the data"),
        ({"doc_to_choice": "yes,no"}, "doc_to_choice is 'yes,no'; write a list"),
        ({"target_delimiter": 5}, "target_delimiter is 5; write it as text"),
        (
            {"num_fewshot": 1, "fewshot_config": {"sampler": "frist_n"}},
            "lm-eval has no sampler frist_n; it has default, ",
        ),
        ({"doc_to_target": None}, "doc_to_target is missing; the data has"),
        ({"doc_to_choice": None}, "doc_to_choice is missing; the data has"),
        ({"doc_to_target": "answer"}, "'answer', which is none of the choices"),
        ({"doc_to_target": "{{answer}}"}, "doc_to_target cannot be written: "),
        ({"doc_to_target": 5}, "doc_to_target is 5, but the question has 2 choices"),
        ({"doc_to_target": -1}, "doc_to_target is -1, but the question has 2 choices"),
        ({"doc_to_choice": "{{options}}"}, "doc_to_choice cannot be written: "),
        ({"doc_to_choice": "{{q}}"}, "doc_to_choice cannot be written: "),
        ({"output_type": "multiple_chioce"}, "invalid output_type 'multiple_chioce'"),
        (
            {"test_split": "tset"},
            "test_split is tset, but the data has the splits test",
        ),
        ({"test_split": None}, "must have valid or test docs"),
        ({"metric_list": [{"metric": "accuracy_"}]}, "no metric accuracy_"),
        ({"metric_list": [{}]}, "without a metric; write a list such as"),
        ({"doc_to_txt": "{{q}}"}, "no key doc_to_txt; did you mean doc_to_text?"),
        (
            {"filter_list": [{"name": "a", "filter": [{"function": "regexx"}]}]},
            "regexx",
        ),
        ({"dataset_kwargs": {"data_files": 5}}, "cannot load the task"),
    ],
)
def test_mistake_in_a_task_is_permanent_and_named(
    environment: Environment, changes: dict[str, Any], expected: str
):
    error = failure(environment, CHOICE | changes)
    assert expected in str(error)
    assert error.exit_code.is_permanent


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("task: quiz\ninclude: none.yaml\n", "none.yaml"),
        ("task: quiz\nmetric_list: !include other.yaml\n", "write `include: FILE`"),
        ("task: quiz\n a: [\n", "the file is not YAML"),
        ("- task: quiz\n", "Expected YAML dict"),
        ("task: quiz\nprocess_docs: !function nowhere.docs\n", "nowhere"),
    ],
)
def test_unreadable_task_file_is_permanent(
    environment: Environment, text: str, expected: str
):
    error = failure(environment, text)
    assert expected in str(error)
    assert error.exit_code.is_permanent


def test_fields_of_the_data_are_named(environment: Environment):
    error = failure(environment, CHOICE | {"doc_to_text": "{{question}}?"})
    assert str(error).endswith(
        "'question' is undefined; the data has the fields q, label, choices"
    )


@pytest.mark.parametrize(
    ("content", "changes", "expected"),
    [
        (CHOICE, {"label": 2}, "question 4: doc_to_target is 2"),
        (CHOICE, {"label": None}, "question 4: doc_to_target is empty"),
        (TEXT | {"doc_to_text": "{{q.strip()}}"}, {"q": None}, "doc_to_text cannot"),
    ],
)
def test_later_question_that_cannot_be_written_is_reported(
    environment: Environment,
    content: dict[str, Any],
    changes: dict[str, Any],
    expected: str,
):
    error = failure(environment, content, questions(**changes))
    assert expected in str(error)
    assert error.exit_code == ExitCode.CONFIG


@pytest.mark.parametrize("split", ["test", None])
def test_more_examples_than_the_data_has_are_refused(
    environment: Environment, split: str | None
):
    error = failure(environment, CHOICE | {"fewshot_split": split}, few_shot=9)
    available = 5 if split else 6
    assert f"needs 9 few-shot examples, but the data has {available}" in str(error)
    assert error.exit_code == ExitCode.CONFIG


def test_script_as_a_data_set_is_refused(environment: Environment):
    folder = Path(str(environment.manifest_dir)) / "script"
    folder.mkdir()
    (folder / "script.py").write_text("raise SystemExit(3)\n")
    error = failure(environment, CHOICE | {"dataset_path": "script"})
    assert "convert the data to JSON Lines or Parquet" in str(error)
    assert error.exit_code == ExitCode.CONFIG


def test_template_of_a_task_cannot_leave_the_sandbox(environment: Environment):
    attack = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    error = failure(environment, CHOICE | {"doc_to_text": attack})
    assert "unsafe" in str(error)


@pytest.mark.parametrize("cause", [ConnectionError("reset"), TimeoutError("slow")])
def test_failure_of_the_network_is_retried(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, cause: Exception
):
    def load_dataset(*_: object, **__: object) -> None:
        raise cause

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    error = failure(environment, CHOICE)
    assert error.exit_code == ExitCode.UNAVAILABLE


def test_mistake_in_a_task_is_known_before_the_model_is_read(
    tmp_path: Path, tiny_model: Path
):
    environment = evaluate_environment(tmp_path, tiny_model)
    folder = Path(str(environment.manifest_dir))
    text = (folder / "tasks" / "verbs.yaml").read_text()
    (folder / "tasks" / "verbs.yaml").write_text(text.replace("sentence", "question"))
    config = evaluate_config(tmp_path / "no-model")
    message, code = run_to_failure(config, environment)
    assert "the data has the fields sentence, label" in message
    assert code == ExitCode.CONFIG


@pytest.mark.parametrize(
    "changes",
    [{"metric_list": [{"metric": "acc"}]}, {"generation_kwargs": {"until": 5}}],
    ids=["metric of choices", "until"],
)
def test_settings_that_do_not_fit_are_a_permanent_failure(
    tmp_path: Path, tiny_model: Path, changes: dict[str, Any]
):
    environment = evaluate_environment(tmp_path, tiny_model)
    folder = Path(str(environment.manifest_dir))
    write_jsonl(folder / "quiz.jsonl", questions())
    (folder / "quiz.yaml").write_text(yaml.safe_dump(TEXT | changes))
    config = evaluate_config(tiny_model, tasks=(Task(name="quiz", file="quiz.yaml"),))
    message, code = run_to_failure(config, environment)
    assert "quiz" in message
    assert code == ExitCode.CONFIG
