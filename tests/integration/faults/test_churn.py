"""Change pipelines at random beside injected faults, for three minutes: `FAULTS=all` runs this."""

import asyncio
import os

import pytest
from support.faults.churn import Report, churn
from support.faults.churn_model import Wanted, possible_phases

SECONDS = 180
PIPELINES = 20
MEMORY_GROWTH = 1.5
"""Memory at the end of the run, relative to a third of the run."""
WANTED = Wanted(
    "p1", serves=False, retained=False, uid="0f1e2d3c-4b5a", train=2, evaluate=3
)
DONE = frozenset(
    {
        ("p1-0f1e2d3c-prepare", ""),
        ("p1-0f1e2d3c-train", "2"),
        ("p1-0f1e2d3c-evaluate", "2.3"),
    }
)


@pytest.fixture(scope="module")
def report(kubeconfig, forks, tmp_path_factory) -> Report:
    if os.environ.get("FAULTS") != "all":
        pytest.skip("FAULTS=all runs it: three minutes")
    folder = tmp_path_factory.mktemp("churn")
    report = asyncio.run(
        churn(kubeconfig, forks, folder, pipelines=PIPELINES, seconds=SECONDS, seed=1)
    )
    print(
        f"actions: {dict(report.actions)}; processes: {report.processes}; settled in {report.settled_seconds:.0f} s"
    )
    return report


def test_every_pipeline_ends_in_a_predicted_state(report):
    assert not report.wrong, "\n".join(report.wrong)


def test_churn_leaves_no_object_without_a_pipeline(report):
    assert not report.leaked


def test_churn_never_runs_two_pods_on_one_claim(report):
    assert not report.problems, "\n".join(report.problems)


def test_churn_exercises_every_action(report):
    assert len(report.actions) == 9
    assert report.processes > PIPELINES


def test_memory_of_the_operator_does_not_grow_with_time(report):
    third = report.samples[len(report.samples) // 3].resident_bytes
    assert report.samples[-1].resident_bytes < MEMORY_GROWTH * third


@pytest.mark.parametrize(
    ("changes", "succeeded", "readable", "expected"),
    [
        ({}, frozenset(), frozenset(), {"Succeeded"}),
        ({"uid": ""}, DONE, DONE, {"Absent"}),
        ({"suspended": True}, frozenset(), frozenset(), {"Suspended"}),
        ({"suspended": True}, DONE, DONE, {"Succeeded"}),
        ({"suspended": True}, DONE, frozenset(), {"Succeeded", "Suspended"}),
        (
            {"suspended": True, "cancelled": True},
            frozenset(),
            frozenset(),
            {"Cancelled"},
        ),
        ({"cancelled": True, "evaluate": 4}, DONE, DONE, {"Cancelled"}),
    ],
)
def test_model_predicts_the_phase(changes, succeeded, readable, expected):
    wanted = Wanted(**{**WANTED.__dict__, **changes})
    assert possible_phases(wanted, succeeded, readable) == expected
