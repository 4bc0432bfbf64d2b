"""What a task cannot score or generate is known before a model is loaded; what works is not refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.trainer.evaluation import evaluate_config, evaluate_environment
from support.trainer.models import write_jsonl
from support.trainer.stages import environment_in, run_to_failure

from finetune_trainer.contract import Environment, ExitCode, GatedMetric, Task
from finetune_trainer.evaluation.tasks import LoadedTasks, load_tasks
from finetune_trainer.runtime.errors import ConfigInvalid

pytestmark = pytest.mark.usefixtures("datasets_cache")

DATA = {"test": "quiz.jsonl", "shots": "shots.jsonl"}
CHOICE = {
    "task": "quiz",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": DATA},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{q}}?",
    "doc_to_target": "label",
    "doc_to_choice": "choices",
    "metric_list": [{"metric": "acc"}],
}
OTHER = CHOICE | {"doc_to_choice": None, "doc_to_target": "{{choices[label]}}"}
EXACT = {"metric": "exact_match"}
TEXT = OTHER | {"output_type": "generate_until", "metric_list": [EXACT]}
LIKELIHOOD = OTHER | {"output_type": "loglikelihood"}
ROLLING = OTHER | {"output_type": "loglikelihood_rolling"}
FIRST = {"function": "take_first"}


def metrics(*names: str, **fields: Any) -> dict[str, Any]:
    return {"metric_list": [{"metric": name, **fields} for name in names]}


def filters(*steps: Any, name: str = "strict") -> dict[str, Any]:
    return {
        "filter_list": [
            {
                "name": name,
                "filter": [*steps],
            }
        ]
    }


def generation(**arguments: Any) -> dict[str, Any]:
    return {"generation_kwargs": arguments}


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    environment = environment_in(tmp_path)
    write_data(tmp_path / "manifest")
    return environment


def write_data(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, object]] = [
        {
            "q": f"Is it {n}",
            "label": n % 3,
            "choices": ["yes", "no", "maybe"],
        }
        for n in range(6)
    ]
    write_jsonl(folder / "quiz.jsonl", records)
    write_jsonl(folder / "shots.jsonl", records[:2])


def load(environment: Environment, content: dict[str, Any]) -> LoadedTasks:
    folder = Path(str(environment.manifest_dir))
    (folder / "quiz.yaml").write_text(yaml.safe_dump(content))
    return load_tasks([Task(name="quiz", file="quiz.yaml")], environment, seed=0)


REFUSED = [
    (CHOICE | metrics("bleu"), "lm-eval does not compute bleu for output_type mult"),
    (CHOICE | metrics("acc", "perplexity"), "does not compute perplexity"),
    (CHOICE | metrics("f1"), "the values of f1 cannot be aggregated"),
    (CHOICE | metrics("likelihood"), "the values of likelihood cannot be aggregated"),
    (LIKELIHOOD | metrics("acc_norm"), "remove it, or use perplexity or acc"),
    (ROLLING | metrics("acc"), "does not compute acc for output_type loglikelihood_r"),
    (TEXT | metrics("acc"), "such as exact_match"),
    (TEXT | metrics("exact_match", ignore_cases=True), "argument 'ignore_cases'"),
    (TEXT | metrics("exact_match", aggregation="meen"), "did you mean mean?"),
    (TEXT | metrics("exact_match", aggregation="f1"), "correct its aggregation"),
    (TEXT | metrics("exact_match", regexes_to_ignore=["["]), "unterminated"),
    (TEXT | metrics("exact_match", "exact_match"), "exact_match 2 times"),
    (TEXT | {"metric_list": "exact_match"}, "metric_list is 'exact_match'; write a"),
    (TEXT | {"metric_list": []}, "metric_list is []; write a list"),
    (TEXT | {"metric_list": ["acc"]}, "the entry 'acc' without a metric"),
    (TEXT | {"filter_list": "strict"}, "filter_list is 'strict'; write a list"),
    (TEXT | {"filter_list": []}, "filter_list is []"),
    (TEXT | {"filter_list": [{"name": "a"}]}, "without name or filter"),
    (TEXT | filters("take_first"), "the step 'take_first' without a function"),
    (TEXT | filters({"function": "regexx"}), "no filter regexx; did you mean regex?"),
    (TEXT | filters({"function": "regex", "pattern": "a"}), "argument 'pattern'"),
    (TEXT | filters({"function": "regex", "regex_pattern": "("}), "missing )"),
    (TEXT | filters({"function": "take_first_k", "k": 3}), "the filter strict cannot"),
    (TEXT | {"filter_list": filters(FIRST)["filter_list"] * 2}, "strict 2 times"),
    (CHOICE | filters({"function": "lowercase"}, FIRST), "the filter strict cannot"),
    (CHOICE | filters({"function": "regex"}, FIRST), "correct filter_list"),
    (TEXT | {"generation_kwargs": ["until"]}, "generation_kwargs is ['until']; write"),
    (TEXT | {"generation_kwargs": 5}, "generation_kwargs is 5; write a mapping"),
    (TEXT | generation(until=5), "until is 5; write a list of texts"),
    (TEXT | generation(until=["a", None]), "write a list of texts"),
    (TEXT | generation(temperature="hot"), "temperature is 'hot'; write a number"),
    (TEXT | generation(do_sample=True), "do_sample is true, but temperature is 0"),
    (TEXT | generation(do_sample="yes"), "do_sample is 'yes'; write true or false"),
    (TEXT | generation(max_gen_tokens=5), "did you mean max_gen_toks?"),
    (TEXT | generation(stop=["a"]), "did you mean until?"),
    (TEXT | generation(max_gen_toks=0), "{'max_gen_toks': 0} cannot be used"),
    (TEXT | generation(num_beams=0), "{'num_beams': 0} cannot be used"),
    (CHOICE | {"num_fewshot": -1}, "num_fewshot is -1; write a whole number of at"),
    (CHOICE | {"num_fewshot": "2"}, "num_fewshot is '2'"),
    (CHOICE | {"num_fewshot": 3, "fewshot_split": "shots"}, "the data has 2; lower"),
    (TEXT | {"repeats": 0}, "repeats is 0; write a whole number of at least 1"),
    (TEXT | {"repeats": "2"}, "repeats is '2'"),
    (TEXT | {"process_results": "utils.f"}, "write !function MODULE.NAME"),
    (TEXT | {"output_type": None}, "output_type is empty; write multiple_choice"),
]


@pytest.mark.parametrize(("content", "expected"), REFUSED)
def test_task_that_cannot_be_scored_is_refused_with_the_fix(
    environment: Environment, content: dict[str, Any], expected: str
):
    with pytest.raises(ConfigInvalid) as caught:
        load(environment, content)
    assert str(caught.value).startswith("evaluate.tasks[quiz]: quiz.yaml: ")
    assert expected in str(caught.value)


VOTE = [{"function": "take_first_k", "k": 2}, {"function": "majority_vote"}, FIRST]
TWO = {
    "filter_list": [
        {"name": "strict", "filter": [{"function": "regex"}, FIRST]},
        {"name": "loose", "filter": [FIRST]},
    ]
}
ACCEPTED = [
    (CHOICE | metrics("acc", "acc_norm", "mcc"), {"acc", "acc_norm", "mcc"}),
    (CHOICE | metrics("exact_match", "brier_score"), {"exact_match", "brier_score"}),
    (CHOICE | metrics("acc_mutual_info"), {"acc_mutual_info"}),
    (CHOICE | {"num_fewshot": 2, "fewshot_split": "shots"}, {"acc"}),
    (LIKELIHOOD | metrics("acc", "perplexity"), {"acc", "perplexity"}),
    (ROLLING | metrics("word_perplexity"), {"word_perplexity"}),
    (TEXT | metrics("bleu", "chrf"), {"bleu", "chrf"}),
    (TEXT | TWO, {"exact_match,strict", "exact_match,loose"}),
    (TEXT | filters(*VOTE) | {"repeats": 2}, {"exact_match"}),
    (TEXT | generation(until="\n", max_tokens=5), {"exact_match"}),
    (TEXT | generation(do_sample=True, temperature=0.7, top_p=0.9), {"exact_match"}),
    (TEXT | {"metric_list": None, "generation_kwargs": None}, {"exact_match"}),
]


@pytest.mark.parametrize(("content", "names"), ACCEPTED)
def test_scores_of_a_task_are_known_before_it_is_evaluated(
    environment: Environment, content: dict[str, Any], names: set[str]
):
    assert set(load(environment, content).metrics["quiz"]) == names


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ({"task": ["quiz", "quiz"]}, "the group both names quiz 2 times"),
        (
            {"task": ["quiz", {"group": "in", "task": ["a", "a"]}]},
            "the group in names a 2 times",
        ),
        (
            {"aggregate_metric_list": [{"metric": "acc", "filter_list": "loose"}]},
            "aggregates acc,loose, which none of its members measures; they measure acc,none",
        ),
        (
            {"task": [CHOICE | metrics("f1") | {"task": "third"}]},
            "its member both::third: metric_list: the values of f1",
        ),
    ],
)
def test_group_that_cannot_be_scored_is_refused_with_the_fix(
    environment: Environment, group: dict[str, Any], expected: str
):
    folder = Path(str(environment.manifest_dir))
    (folder / "quiz.yaml").write_text(yaml.safe_dump(CHOICE))
    content = {"group": "both", "task": ["quiz"], **group}
    (folder / "both.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigInvalid) as caught:
        load_tasks([Task(name="both", file="both.yaml")], environment, seed=0)
    assert expected in str(caught.value)


@pytest.mark.parametrize("metric", ["acc", "exact_match", "exact_match,none"])
def test_gate_on_another_score_ends_the_stage_before_the_model(
    tmp_path: Path, tiny_model: Path, metric: str
):
    environment = evaluate_environment(tmp_path, tiny_model)
    write_data(tmp_path / "manifest")
    (tmp_path / "manifest/quiz.yaml").write_text(yaml.safe_dump(TEXT | TWO))
    config = evaluate_config(
        tmp_path / "no-model", tasks=(Task(name="quiz", file="quiz.yaml"),)
    ).model_copy(update={"gated": (GatedMetric(task="quiz", metric=metric),)})
    message, code = run_to_failure(config, environment)
    assert message == (
        f"evaluate.gates[quiz].metric: {metric} is not measured; "
        "the task measures exact_match,strict and exact_match,loose"
    )
    assert code == ExitCode.CONFIG
