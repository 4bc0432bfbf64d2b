"""`finetune validate --check` loads task files as evaluate does, without running code of them."""

import json

import pytest
import yaml
from support.operator.scenario import ALL_STAGES, merged

from finetune_cli.__main__ import main
from finetune_cli.checks.task_file import task_filters

pytestmark = pytest.mark.usefixtures("unread_data")

QUIZ = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "quiz.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{q}}?",
    "doc_to_target": "label",
    "doc_to_choice": ["yes", "no"],
    "metric_list": [{"metric": "acc"}],
}
REMOTE = {"data_files": "https://example.com/quiz.jsonl"}
FIRST = [{"function": "take_first"}]
EVIL = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """A function that checks a manifest with these tasks, and returns the exit code and the lines of the output."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')
    questions = [json.dumps({"q": f"Is it {n}", "label": n % 2}) for n in range(4)]
    (tmp_path / "quiz.jsonl").write_text("\n".join(questions))

    def check(tasks, gates=()):
        spec = {
            "model": {"uri": "base"},
            "datasets": [{"uri": "data.jsonl"}],
            "evaluate": {"tasks": tasks, "gates": list(gates)},
            "push": {"targets": [{"uri": "published"}]},
            "deploy": {"when": "Always"},
        }
        manifest = {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "FineTunePipeline",
            "metadata": {"name": "demo"},
            "spec": merged(ALL_STAGES, spec),
        }
        (tmp_path / "p.yaml").write_text(yaml.safe_dump(manifest))
        code = main(["validate", "--check", "p.yaml"])
        return code, capsys.readouterr().out.splitlines()

    return check


@pytest.fixture
def write_task(tmp_path):
    """A function that writes a task file, and returns its entry in evaluate.tasks."""

    def write_task(name, text="", **changes):
        text += yaml.safe_dump(QUIZ | {"task": name} | changes)
        (tmp_path / f"{name}.yaml").write_text(text)
        return {"name": name, "file": f"{name}.yaml"}

    return write_task


def test_mistakes_in_task_files_are_errors_with_their_lines(
    check, write_task, tmp_path
):
    tasks = [
        write_task("good"),
        write_task("typo", doc_to_text="{{question}}?"),
        write_task("label", doc_to_target=5),
        write_task("shots") | {"fewShot": 9},
        {"name": "both", "file": "both.yaml"},
    ]
    group = {"group": "both", "task": ["good", "gone"]}
    (tmp_path / "both.yaml").write_text(yaml.safe_dump(group))
    code, lines = check(tasks)
    assert code == 2
    assert len(lines) == 4
    expected = [
        "spec.evaluate.tasks[1].file: doc_to_text cannot be written: ",
        "spec.evaluate.tasks[2].file: doc_to_target is 5, but",
        "spec.evaluate.tasks[3].file: each question needs 9 few-shot examples",
        "spec.evaluate.tasks[4].file: the group both names gone, which no file",
    ]
    for line, message in zip(lines, expected, strict=True):
        assert message in line


def test_code_of_a_task_does_not_run_and_is_named(check, write_task, tmp_path):
    (tmp_path / "evil.py").write_text(EVIL)
    (tmp_path / "metric").mkdir()
    (tmp_path / "metric/metric.py").write_text(EVIL)
    trusted = {"allowCode": True}
    tasks = [
        write_task("code", "process_docs: !function evil.docs\n") | trusted,
        write_task("script", metric_list=[{"metric": "./metric"}]) | trusted,
        write_task("hub", dataset_path="org/quiz"),
        write_task("remote", dataset_kwargs=REMOTE),
        write_task("pickled", dataset_path="pandas"),
        {"name": "arc_easy"},
    ]
    code, lines = check(tasks)
    assert code == 0
    expected = {
        "arc_easy": "evaluate downloads the data set allenai/ai2_arc from the Hugging Face hub",
        "code.yaml": "it runs code (!function evil.docs), which only evaluate does",
        "script.yaml": "its metric ./metric is a script, which only evaluate runs",
        "hub.yaml": "its data set org/quiz is read by evaluate only",
        "remote.yaml": "its data set https://example.com/quiz.jsonl is read by evaluate only",
        "pickled.yaml": "its data set pandas is read by evaluate only",
    }
    assert lines[:-1] == [
        f"p.yaml: {name}: not looked at: {reason} (note)"
        for name, reason in expected.items()
    ]
    assert not list(tmp_path.rglob("ran"))


def test_code_that_evaluate_refuses_is_an_error(check, write_task, tmp_path):
    (tmp_path / "evil.py").write_text(EVIL)
    (tmp_path / "base.inc").write_text("process_docs: !function evil.docs\n")
    script = {"metric": "./metric", "hf_evaluate": True}
    group = {"group": "group", "task": [{"task": "code"}]}
    (tmp_path / "group.yaml").write_text(yaml.safe_dump(group))
    code, lines = check(
        [
            write_task("code", "process_docs: !function evil.docs\n"),
            write_task("included", "include: [base.inc]\n"),
            write_task("script", metric_list=[script]),
            {"name": "group", "file": "group.yaml"},
        ]
    )
    assert code == 2
    assert len(lines) == 4
    for number, line in enumerate(lines):
        assert f"spec.evaluate.tasks[{number}].file: " in line
        assert line.endswith("if you trust it, set allowCode: true for this task")
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.parametrize(
    ("changes", "metric", "message"),
    [
        ({"metric_list": [{"metric": "bleu"}]}, "bleu", ".file: metric_list: lm-eval"),
        ({"repeats": 0}, "acc", ".file: repeats is 0; write a whole number"),
        ({"num_fewshot": -1}, "acc", ".file: num_fewshot is -1"),
        ({}, "acc_norm", "acc_norm is not measured by the task quiz: quiz.yaml lists"),
        ({}, "acc,loose", "acc,loose is not measured by the task"),
    ],
)
def test_task_that_cannot_be_scored_is_the_only_error(
    check, write_task, changes, metric, message
):
    gate = {"task": "quiz", "metric": metric, "value": 0.5}
    code, lines = check([write_task("quiz", **changes)], [gate])
    assert code == 2
    assert len(lines) == 1
    assert message in lines[0]


def test_gate_on_a_score_that_a_group_lacks_is_an_error(check, write_task, tmp_path):
    write_task("quiz", filter_list=[{"name": "a", "filter": FIRST}])
    group = {
        "group": "all",
        "task": ["quiz"],
        "aggregate_metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "all.yaml").write_text(yaml.safe_dump(group))
    gate = {"task": "all", "metric": "acc", "value": 0.5}
    task = {"name": "all", "file": "all.yaml"}
    assert check([task], [gate])[0] == 0
    code, lines = check([task], [gate | {"metric": "acc_norm"}])
    assert code == 2
    assert "acc_norm is not measured by the task all" in lines[0]


def test_missing_lm_eval_is_a_note(check, write_task, monkeypatch):
    monkeypatch.setattr(
        "finetune_cli.checks.task_loading.importlib.util.find_spec", lambda _: None
    )
    code, lines = check([write_task("quiz"), {"name": "arc_easy"}])
    assert code == 0
    assert lines == [
        "p.yaml: arc_easy: not looked at: lm-eval is not installed here (note)",
        "p.yaml: quiz.yaml: not looked at: lm-eval is not installed here (note)",
        "p.yaml: valid",
    ]


def test_gate_on_a_group_without_a_mean_is_an_error(check, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "finetune_cli.checks.task_loading.load_in_trainer",
        lambda tasks: {task.name: {"exit_code": None} for task in tasks},
    )
    (tmp_path / "both.yaml").write_text("group: both\ntask: [a, b]\n")
    gate = {"task": "both", "value": 0.5}
    code, lines = check([{"name": "both", "file": "both.yaml"}], [gate])
    assert code == 2
    assert "add aggregate_metric_list to both.yaml" in lines[0]


FILTERS = [{"name": "strict"}, {"name": "loose"}]
EXACT = {"metric": "exact_match"}


@pytest.mark.parametrize(
    ("filters", "metric", "message"),
    [
        (FILTERS, "exact_match,strict", ""),
        (FILTERS, "exact_match", "write exact_match,strict or exact_match,loose"),
        (FILTERS, "exact_match,none", "has exact_match,strict and exact_match,loose"),
        (FILTERS[:1], "exact_match", ""),
        (FILTERS[:1], "exact_match,none", "quiz.yaml has exact_match,strict"),
        (None, "exact_match,none", ""),
        (None, "exact_match,strict", "quiz.yaml has exact_match,none"),
    ],
)
def test_gate_names_a_filter_that_the_task_has(
    check, write_task, monkeypatch, filters, metric, *, message
):
    monkeypatch.setattr(
        "finetune_cli.checks.task_loading.load_in_trainer",
        lambda tasks: {task.name: {"exit_code": None} for task in tasks},
    )
    task = write_task("quiz", metric_list=[EXACT], filter_list=filters)
    gate = {"task": "quiz", "metric": metric, "value": 0.5}
    code, lines = check([task], [gate])
    assert code == (2 if message else 0)
    assert message in lines[0]


@pytest.mark.parametrize(
    ("text", "filters"),
    [
        ("group: all\ntask: [a]\naggregate_metric_list: [{metric: acc}]\n", None),
        (
            "group: all\ntask: [a]\naggregate_metric_list: [{metric: acc, filter_list: a}]\n",
            ["a"],
        ),
        ("task: a\nfilter_list: loose\n", None),
        ("task: a\nfilter_list: [{filter: []}]\n", None),
        ("task: a\nclass: !function b.C\n", None),
        ("[1, 2", None),
    ],
)
def test_filters_of_a_task_file_are_known_or_none(tmp_path, text, filters):
    (tmp_path / "a.yaml").write_text(text)
    assert task_filters(tmp_path / "a.yaml", "acc") == filters
