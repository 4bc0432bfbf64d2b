"""A group of lm-eval's tasks in a task file: members in files of their own, inline, or in groups inside."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.trainer.evaluation import evaluate_config, evaluate_environment
from support.trainer.models import write_jsonl
from support.trainer.stages import environment_in, run_to_result

from finetune_trainer.contract import Environment, EvaluateResult, Task
from finetune_trainer.evaluation.task_files import Loaded
from finetune_trainer.evaluation.tasks import load_tasks
from finetune_trainer.runtime.errors import ConfigInvalid

pytestmark = pytest.mark.usefixtures("datasets_cache")

MEAN = [{"metric": "acc", "aggregation": "mean", "weight_by_size": True}]


def member(name: str, prefix: str = "", **changes: Any) -> dict[str, Any]:
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": prefix + "{{q}}?",
        "doc_to_target": "label",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": "acc"}],
        **changes,
    }


def group(*members: Any, name: str = "both") -> dict[str, Any]:
    return {
        "group": name,
        "task": list(members),
        "aggregate_metric_list": MEAN,
    }


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    environment = environment_in(tmp_path)
    write_questions(tmp_path / "manifest" / "tasks")
    return environment


def write_questions(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    answers = ["yes", "no"]
    records: list[dict[str, object]] = [
        {"q": f"Is it {number}", "label": number % 2, "choices": answers}
        for number in range(8)
    ]
    write_jsonl(folder / "questions.jsonl", records)


def write(environment: Environment, name: str, content: dict[str, Any]) -> None:
    path = Path(str(environment.manifest_dir)) / "tasks" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(content))


def load(environment: Environment, name: str = "both") -> Loaded:
    task = Task(name=name, file=f"tasks/{name}.yaml")
    return load_tasks([task], environment, seed=0).tasks


def test_members_in_files_beside_the_group_are_loaded(environment: Environment):
    write(environment, "first.yaml", member("first"))
    write(environment, "below/second.yaml", member("second", "Say: "))
    write(environment, "both.yaml", group("first", "second"))
    loaded = load(environment)
    assert loaded["tasks"].keys() == {"first", "second"}
    assert loaded["group_map"] == {"both": ["first", "second"]}


def test_members_inside_the_file_are_loaded(environment: Environment):
    write(environment, "both.yaml", group(member("first"), member("second")))
    assert load(environment)["tasks"].keys() == {"both::first", "both::second"}


def test_group_inside_a_group_is_loaded(environment: Environment):
    inner = group("first", name="inner")
    write(environment, "first.yaml", member("first"))
    write(environment, "both.yaml", group(inner, member("second")))
    loaded = load(environment)
    assert loaded["tasks"].keys() == {"first", "both::second"}
    assert loaded["groups"].keys() == {"both", "both::inner"}


def test_member_with_changes_and_included_keys_is_loaded(environment: Environment):
    common = member("unused")
    common.pop("task")
    write(environment, "common", common)
    write(environment, "first.yaml", {"task": "first", "include": "common"})
    change = {"task": "first", "doc_to_text": "Answer: {{q}}?"}
    write(environment, "both.yaml", group(change))
    [task] = load(environment)["tasks"].values()
    assert task.doc_to_text(task.eval_docs[0]) == "Answer: Is it 0?"


def test_group_wins_over_another_file_with_its_name(environment: Environment):
    write(environment, "first.yaml", member("first"))
    write(environment, "another.yaml", group("first"))
    write(environment, "both.yaml", group("first", member("second")))
    assert load(environment)["tasks"].keys() == {"first", "both::second"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (group("frist"), "names frist, which no file in .*did you mean first?"),
        (group({"task": "frist"}), "names frist, which no file in"),
        (group(), "the group both has no members"),
        (group("both"), "contains itself; remove the member"),
        (
            group("first") | {"aggregate_metric_list": [{"metric": "f1"}]},
            "aggregates f1, which none of its members measures; they measure acc",
        ),
        ({"group": "both", "task": "first"}, "the group both has no members"),
        ({"task": ["first"]}, "it must hold one task .* or one group"),
        ({"aggregate_metric_list": MEAN}, "it must hold one task .* or one group"),
        (group("first", name="pair"), "the file defines `group: pair`"),
        (
            group(member("third", doc_to_text="{{question}}")),
            "its member both::third: doc_to_text cannot be written",
        ),
        (
            group(member("third", doc_to_txt="{{q}}")),
            "no key doc_to_txt; did you mean doc_to_text?",
        ),
    ],
)
def test_group_that_cannot_work_is_refused_with_the_fix(
    environment: Environment, content: dict[str, Any], expected: str
):
    write(environment, "first.yaml", member("first"))
    write(environment, "both.yaml", content)
    with pytest.raises(ConfigInvalid, match=expected) as caught:
        load(environment)
    assert str(caught.value).startswith("evaluate.tasks[both]: tasks/both.yaml: ")


@pytest.mark.parametrize("mean", [MEAN, None])
def test_mean_of_a_group_and_the_members_scores_are_reported(
    tmp_path: Path, tiny_model: Path, mean: list[dict[str, Any]] | None
):
    environment = evaluate_environment(tmp_path, tiny_model)
    write_questions(tmp_path / "manifest" / "tasks")
    content = group(member("first"), member("second", "Say: "))
    write(environment, "both.yaml", content | {"aggregate_metric_list": mean})
    tasks = (Task(name="both", file="tasks/both.yaml"),)
    config = evaluate_config(tiny_model, tasks=tasks, compare_with_base=True)
    scores = run_to_result(config, environment, EvaluateResult).scores
    members = [scores[f"both::{name}"]["acc"] for name in ("first", "second")]
    output = environment.stage_dir("evaluate", "e1") / "output" / "results.json"
    results = json.loads(output.read_text())["results"]
    assert [score.value for score in members] == [
        results[f"both::{name}"]["acc,none"] for name in ("first", "second")
    ]
    assert all(score.base is not None for score in members)
    assert ("both" in scores) == (mean is not None)
    if mean:
        expected = sum(score.value for score in members) / 2
        assert scores["both"]["acc"].value == pytest.approx(expected)


def test_members_of_a_large_group_are_left_out_of_the_result(environment: Environment):
    from finetune_trainer.evaluation.tasks import members_of  # noqa: PLC0415

    write(environment, "both.yaml", group(*(member(f"m{n}") for n in range(16))))
    assert members_of(["both"], load(environment)) == {"both": []}
