"""The chart's alerts in Prometheus' own unit tests of rules: `MONITORING=all` runs them.

Promtool takes minutes to build without Go's cache, so that it is not in the usual lane.
"""

import os
import subprocess
from pathlib import Path

import pytest
import yaml
from support.alert_cases import CASES, Case
from support.monitoring import alert_rules
from support.programs import program

pytestmark = pytest.mark.skipif(os.environ.get("MONITORING") != "all", reason="MONITORING=all runs it")


def promtool(*arguments: object) -> subprocess.CompletedProcess:
    command = [program("promtool"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def write_rules(folder: Path, rules) -> Path:
    path = folder / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "finetune", "rules": rules}]}))
    return path


def unit_test(folder: Path, case: Case, rules) -> subprocess.CompletedProcess:
    """Run a case against rules."""
    rule = next(one for one in rules if one["alert"] == case.alert)
    fires = {
        "exp_labels": {**(case.labels or {}), **rule["labels"]},
        "exp_annotations": {
            "summary": case.summary,
            "description": case.description,
            "runbook_url": rule["annotations"]["runbook_url"],
        },
    }
    test = {
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in case.series],
        "alert_rule_test": [
            {
                "eval_time": f"{case.minutes}m",
                "alertname": case.alert,
                "exp_alerts": [] if case.labels is None else [fires],
            }
        ],
    }
    path = folder / "test.yaml"
    content = {"rule_files": [str(write_rules(folder, rules))], "evaluation_interval": "1m", "tests": [test]}
    path.write_text(yaml.safe_dump(content))
    return promtool("test", "rules", path)


def test_promtool_accepts_the_rules(tmp_path):
    done = promtool("check", "rules", write_rules(tmp_path, alert_rules()))
    assert done.returncode == 0, done.stderr
    assert "8 rules found" in done.stdout


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
