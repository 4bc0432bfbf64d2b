"""The chart's alerts and panels of GPUs in Prometheus' own unit tests: `MONITORING=all` runs them.

Promtool takes minutes to build without Go's cache, so that it is not in the usual lane.
"""

import os
import subprocess
from pathlib import Path

import pytest
import yaml
from support.operator.alert_cases import CASES, Case
from support.operator.monitoring import DCGM, alert_rules, dashboard_expressions
from support.programs import program

pytestmark = pytest.mark.skipif(
    os.environ.get("MONITORING") != "all", reason="MONITORING=all runs it"
)


def promtool(*arguments: object) -> subprocess.CompletedProcess:
    command = [program("promtool"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def write_rules(folder: Path, rules) -> Path:
    path = folder / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "finetune", "rules": rules}]}))
    return path


def unit_test(folder: Path, case: Case, rules) -> subprocess.CompletedProcess:
    """Run a case against rules."""
    [rule] = [rule for rule in rules if rule["alert"] == case.alert]
    fires = {
        "exp_labels": {**(case.labels or {}), **rule["labels"]},
        "exp_annotations": {
            "summary": case.summary,
            "description": case.description,
            "runbook_url": rule["annotations"]["runbook_url"],
        },
    }
    expected = {
        "eval_time": f"{case.minutes}m",
        "alertname": case.alert,
        "exp_alerts": [] if case.labels is None else [fires],
    }
    file = str(write_rules(folder, rules))
    return run_test(folder, case.series, [file], alert_rule_test=[expected])


def run_test(
    folder: Path, series, rule_files=(), **expected
) -> subprocess.CompletedProcess:
    """Run one unit test with a sample of each series a minute."""
    given = [{"series": name, "values": values} for name, values in series]
    tests = [{"interval": "1m", "input_series": given, **expected}]
    suite = {
        "rule_files": list(rule_files),
        "evaluation_interval": "1m",
        "tests": tests,
    }
    path = folder / "test.yaml"
    path.write_text(yaml.safe_dump(suite))
    return promtool("test", "rules", path)


def test_promtool_accepts_the_rules(tmp_path):
    done = promtool("check", "rules", write_rules(tmp_path, alert_rules()))
    assert done.returncode == 0, done.stderr
    assert "12 rules found" in done.stdout


def test_every_alert_has_a_case_in_which_it_fires_and_one_not():
    rules = {rule["alert"] for rule in alert_rules()}
    assert {case.alert for case in CASES if case.labels is not None} == rules
    assert {case.alert for case in CASES if case.labels is None} == rules


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.alert}: {case.name}")
def test_alert_fires_as_the_series_say(case, tmp_path):
    done = unit_test(tmp_path, case, alert_rules())
    assert done.returncode == 0, done.stdout + done.stderr


def test_case_fails_with_other_thresholds(tmp_path):
    """Proves that the cases can fail."""
    waits = next(case for case in CASES if case.name == "half an hour for capacity")
    assert unit_test(tmp_path, waits, alert_rules(waitingMinutes=20)).returncode == 1


STEP = 'finetune_stage_step{{stage="train", namespace="team", pod="{}", pipeline="{}", attempt="2"}}'
TRAININGS = ((STEP.format("p", "demo"), "0x10"), (STEP.format("q", "other"), "7x10"))
"""Two pipelines in one namespace; the one of the panel has made no step yet."""
EXPORTED = '{}{{gpu="{}", namespace="gpus", pod="dcgm", exported_namespace="team", exported_pod="{}"}}'
HONORED = '{}{{gpu="{}", namespace="team", pod="{}"}}'
UNUSED = '{}{{gpu="3", namespace="gpus", pod="dcgm"}}'
"""A GPU that no pod has."""


def panel_test(
    folder: Path, metric: str, gpu: str, expression: str
) -> subprocess.CompletedProcess:
    """Expect the mean of the two GPUs of the pipeline's pod from a panel, beside a GPU of another pod."""
    used = [
        (gpu.format(metric, number, pod), f"{value}x10")
        for number, pod, value in ((0, "p", 90), (1, "p", 20))
    ]
    others = [(gpu.format(metric, 2, "q"), "5x10"), (UNUSED.format(metric), "0x10")]
    sample = {
        "labels": '{namespace="team", pod="p", stage="train", attempt="2"}',
        "value": 55,
    }
    expected = {
        "expr": expression,
        "eval_time": "5m",
        "exp_samples": [sample],
    }
    return run_test(folder, [*TRAININGS, *used, *others], promql_expr_test=[expected])


def gpu_panel(metric: str) -> str:
    """Return the expression of the only panel that shows a metric of GPUs, for the pipeline team/demo."""
    [expression] = [
        expression
        for expression in dashboard_expressions().values()
        if metric in expression
    ]
    return expression.replace('namespace="any"', 'namespace="team"').replace(
        'pipeline="any"', 'pipeline="demo"'
    )


def test_every_panel_of_gpus_has_a_case():
    panels = {
        name: text for name, text in dashboard_expressions().items() if "GPU" in name
    }
    assert len(panels) == len(DCGM)
    assert all(any(metric in text for text in panels.values()) for metric in DCGM)


@pytest.mark.parametrize(
    "gpu", [EXPORTED, HONORED], ids=["exported labels", "honored labels"]
)
@pytest.mark.parametrize("metric", DCGM)
def test_panel_shows_the_gpus_of_the_pipelines_pod(metric, gpu, tmp_path):
    done = panel_test(tmp_path, metric, gpu, gpu_panel(metric))
    assert done.returncode == 0, done.stdout + done.stderr


def test_panel_with_another_aggregation_fails_its_case(tmp_path):
    """Proves that the cases can fail."""
    [metric, *_] = DCGM
    expression = gpu_panel(metric).replace("avg by", "max by", 1)
    assert panel_test(tmp_path, metric, EXPORTED, expression).returncode == 1
