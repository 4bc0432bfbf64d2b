"""The figures of the benchmarks of the operator, from events, audit logs and samples."""

import argparse
import json
import runpy
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import control_plane
from figures import add_json_option, table, write_figures
from operator_bench.audit import count_requests, created_objects
from operator_bench.observer import Observer
from operator_bench.runs import Run, percentiles, share_below, transitions

ROOT = Path(__file__).parents[3]
MEASUREMENTS = runpy.run_path(str(ROOT / ".ci/generated/measurements.py"))
OPERATOR = "system:serviceaccount:bench:operator"


def request(number, user, verb, resource, *, second=0, status=200, **fields):
    """One request of an audit log."""
    group, _, subresource = resource.partition("/")
    return {
        "auditID": str(number),
        "user": {"username": user},
        "userAgent": "kwok/v0.8.0",
        "verb": verb,
        "requestURI": "/",
        "objectRef": {"resource": group, "subresource": subresource},
        "requestReceivedTimestamp": f"2030-01-01T00:00:{second:02}.5Z",
        "responseStatus": {"code": status},
        **fields,
    }


@pytest.fixture
def audit_log(tmp_path):
    def write(*requests):
        file = tmp_path / "audit.log"
        file.write_text("".join(json.dumps(request) + "\n" for request in requests))
        return file

    return write


def job(pipeline, stage, *conditions):
    labels = {"finetune.dev/pipeline": pipeline, "finetune.dev/stage": stage}
    status = {"conditions": [{"type": kind, "status": "True"} for kind in conditions]}
    return {
        "metadata": {"name": f"{pipeline}-{stage}", "labels": labels},
        "status": status,
    }


def test_requests_are_counted_once_by_agent_and_resource(audit_log):
    watch = request(1, OPERATOR, "watch", "jobs")
    log = audit_log(
        watch,
        watch,
        request(2, OPERATOR, "update", "finetunepipelines/status", status=409),
        request(3, OPERATOR, "update", "leases"),
        request(4, "finetune-e2e", "patch", "pods/status"),
        request(
            5, "system:serviceaccount:kube-system:job-controller", "create", "pods"
        ),
    )
    counts = count_requests(log, "operator", 0)
    assert counts.of_account == {"watch jobs": 1, "update finetunepipelines/status": 1}
    assert counts.errors == {"409 update finetunepipelines/status": 1}
    assert {agent: dict(verbs) for agent, verbs in counts.by_agent.items()} == {
        "operator": {"watch": 1, "update": 1},
        "kwok": {"patch": 1},
        "job-controller": {"create": 1},
    }
    assert counts.own_writes == 1
    assert counts.all_writes == 3


def test_requests_before_the_start_are_not_counted(audit_log):
    log = audit_log(
        request(1, OPERATOR, "get", "jobs", second=1),
        request(2, OPERATOR, "get", "jobs", second=3),
    )
    assert count_requests(log, "operator", 1893456002.0).of_account == {"get jobs": 1}


def test_bodies_of_refused_requests_are_not_captured(audit_log):
    body = {"kind": "Job"}
    log = audit_log(
        request(1, OPERATOR, "create", "jobs", status=409, requestObject=body),
        request(2, OPERATOR, "create", "jobs", status=201, requestObject=body),
        request(
            3,
            "system:serviceaccount:bench:user",
            "create",
            "jobs",
            status=201,
            requestObject=body,
        ),
    )
    assert created_objects(log, "operator") == [body]


def test_observer_waits_for_pipelines_and_for_their_jobs():
    observer = Observer(1, watches_pipelines=True)
    observer.job(job("p", "push", "Complete"))
    assert not observer.done.is_set()
    observer.pipeline(job("p", "") | {"metadata": {"name": "p"}})
    assert not observer.done.is_set()
    finished = {
        "conditions": [
            {"type": kind, "status": "True"} for kind in ("Finished", "Ready")
        ]
    }
    observer.pipeline({"metadata": {"name": "p"}, "status": finished})
    assert observer.done.is_set()
    assert observer.result()["succeeded"] == 1


def test_observer_keeps_the_first_time_of_an_event():
    observer = Observer(2, watches_pipelines=False)
    observer.job(job("p", "train"))
    first = observer.created["p"]["train"]
    observer.job(job("p", "train", "Complete"))
    assert observer.created["p"]["train"] == first <= observer.complete["p"]["train"]


def test_transition_is_from_a_stage_to_the_next_job():
    done = {"p": {"prepare": 2.0, "train": 5.0, "push": 9.0}}
    created = {"p": {"prepare": 1.0, "train": 2.5, "evaluate": 4.0}}
    assert transitions(done, created) == [500.0, -1000.0]


def test_figures_have_the_command_and_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench/merge.py", "--layers", "4"])
    file = tmp_path / "figures.json"
    write_figures(file, {"speeds": [1.5], "folder": tmp_path})
    figures = json.loads(file.read_text())
    assert figures["command"] == ["bench/merge.py", "--layers", "4"]
    assert figures["machine"].keys() >= {"processors", "memory"}
    assert figures["speeds"] == [1.5]
    assert figures["folder"] == str(tmp_path)


def test_no_figures_are_written_without_the_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    add_json_option(parser)
    write_figures(parser.parse_args([]).json, {"speeds": [1.5]})
    assert list(tmp_path.iterdir()) == []


def test_a_generated_page_can_show_a_table_of_the_figures():
    block = table(["policy", "cost"], [["Auto", "1.00"]])
    assert MEASUREMENTS["block_text"](block) == (
        "| policy | cost |\n| --- | --- |\n| Auto | 1.00 |"
    )


def test_generated_page_shows_a_run_as_its_benchmark_wrote_it(tmp_path, monkeypatch):
    monkeypatch.setitem(MEASUREMENTS["block_text"].__globals__, "RESULTS", tmp_path)
    tables = [table(["policy", name], [["Auto", "1.00"]]) for name in ("cost", "time")]
    write_figures(tmp_path / "run.json", {"tables": tables})
    assert MEASUREMENTS["block_text"]({"run": "run.json"}) == (
        "| policy | cost |\n| --- | --- |\n| Auto | 1.00 |\n\n"
        "| policy | time |\n| --- | --- |\n| Auto | 1.00 |"
    )


def run_of(variant, stages_per_second):
    names = [field.name for field in fields(Run)]
    known: dict[str, Any] = dict.fromkeys(names, 1.0)
    many = {
        "first_job": [1, 2, 3],
        "from_pod": [1, 2, 3],
        "from_complete": [1, 2, 3],
    }
    counts = {
        "cpu": {"etcd": 1.0},
        "own": {"get pods": 2.0, "patch jobs": 3.0},
    }
    changes = {"variant": variant, "stages_per_second": stages_per_second}
    return Run(**known | many | counts | changes)


def test_table_of_control_plane_has_a_column_for_each_variant():
    speeds = {"operator": (10.0, 12.0), "null-pod": (20.0, 20.0)}
    runs = [run_of(name, speed) for name in speeds for speed in speeds[name]]
    columns, *rows = control_plane.table_of(20, runs)
    cells = {row[0]: row[1:] for row in rows}
    assert columns == ["20 pipelines, 2 runs", "operator", "null-pod"]
    assert cells["stages/s"] == ["11.0 (10.0-12.0)", "20.0"]
    assert cells["own writes"] == ["3.0", "3.0"]
    assert cells["stages/s, operator / variant"] == ["", "0.55 (0.50-0.60)"]


def test_table_of_variants_without_the_operator_has_no_ratios():
    *_, ratios = control_plane.table_of(20, [run_of("null-pod", 20.0)])
    assert ratios == ["stages/s, operator / variant", ""]


def test_percentiles_of_a_hundred_values():
    assert percentiles([float(value) for value in range(100, 0, -1)]) == [50, 95, 99]


def test_share_of_hand_overs_counts_only_the_smaller_values():
    assert share_below([10, 999, 1000, 5000], 1000) == 0.5
    assert share_below([], 1000) == 1.0
