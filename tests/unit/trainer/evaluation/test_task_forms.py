"""Forms of a task that lm-eval takes are not refused, and a task that is no task has an answer of its own."""

import io
import json
import re
from types import SimpleNamespace

import pytest

from finetune_trainer.contract import ExitCode
from finetune_trainer.evaluation import check
from finetune_trainer.evaluation.task_shapes import wrong_shape
from finetune_trainer.runtime.errors import short_reason


def score(_question, _answers):
    return {"own": 1.0}


def test_empty_metric_list_beside_a_function_is_right():
    task = SimpleNamespace(metric_list=[], process_results=score)
    assert wrong_shape(task) == ""


def test_empty_metric_list_alone_is_refused():
    task = SimpleNamespace(metric_list=[], process_results=None)
    assert wrong_shape(task).startswith("metric_list is []; write a list such as")


@pytest.mark.parametrize("value", [None, "hot"])
def test_temperature_that_is_no_number_is_refused_by_name(value):
    task = SimpleNamespace(generation_kwargs={"temperature": value})
    assert wrong_shape(task).endswith(f"temperature is {value!r}; write a number")


@pytest.mark.parametrize("until", ["", [""], ["a", ""]])
def test_empty_text_that_would_end_each_answer_is_refused(until):
    task = SimpleNamespace(generation_kwargs={"until": until})
    assert wrong_shape(task).endswith("write a list of texts that are not empty")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (IndexError("string index out of range"), "string index out of range"),
        (re.error("missing )"), "missing )"),
        (ZeroDivisionError("modulo by zero"), "a number has an impossible value (modulo by zero)"),
    ],
)  # fmt: skip
def test_reason_has_no_class_of_an_error(error, reason):
    assert short_reason(error) == reason


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "a b"}, "name: String should match pattern"),
        ({"name": "a", "few_shot": -1}, "few_shot"),
        ({}, "name: Field required"),
        ("a", "valid dictionary"),
    ],
)
def test_invalid_task_has_an_answer(monkeypatch, capsys, fields, words):
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps([fields])))
    monkeypatch.setattr(check, "run_no_code", lambda: None)
    check.main()
    answer = json.loads(capsys.readouterr().out)
    assert answer["exit_code"] == ExitCode.CONFIG
    assert answer["message"].startswith("the task is invalid: ")
    assert words in answer["message"]
