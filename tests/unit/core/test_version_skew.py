"""A status or a message of another version of the program: what is unknown is kept, and stops nothing."""

import copy
import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.operator.scenario import ORDER, RESULTS, Scenario

from finetune_cli.output.status.text import stage_summary
from finetune_operator.api.conditions import Reason
from finetune_operator.api.status import PipelineStatus, StageState, StageStatus
from finetune_operator.errors import InvalidObject
from finetune_operator.kubernetes.pipeline_object import parse_pipeline
from finetune_operator.kubernetes.translate.pod import ObservedPod
from finetune_trainer.contract import Progress, TerminationMessage, TrainConfig

PLAIN = st.one_of(
    st.booleans(), st.integers(-(10**9), 10**9), st.text("abc é", max_size=9)
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz"), inner),
    max_leaves=5,
)
OBJECTS = (
    "$", "$.conditions.0", "$.conditions.2", "$.observedAnnotations", "$.gates.0", "$.model", "$.stages.train",
    "$.stages.train.attempts.0", "$.stages.train.attempts.1", "$.stages.train.progress", "$.stages.train.result",
    "$.stages.evaluate.result", "$.stages.evaluate.result.scores.exam.acc", "$.stages.deploy",
)  # fmt: skip


def stored_status(scenario: Scenario) -> dict:
    return json.loads(scenario.cluster.pipelines[scenario.key].status)


def store(scenario: Scenario, status: dict) -> None:
    scenario.cluster.pipelines[scenario.key].status = json.dumps(status)


def at(status, path: str):
    """Return the object at a path such as $.stages.train.attempts.0; a stage is found by its name."""
    for name in path.split(".")[1:]:
        if isinstance(status, list):
            status = (
                status[int(name)]
                if name.isdigit()
                else next(entry for entry in status if entry["name"] == name)
            )
        else:
            status = status[name]
    return status


def finished_scenario() -> Scenario:
    """Return a finished pipeline whose training was interrupted once."""
    return copy.deepcopy(_finished())


@cache
def _finished() -> Scenario:
    scenario = Scenario().run("prepare")
    scenario.cluster.evict(scenario.start("train"), step=5, saved=5)
    job = scenario.reconcile_until_stable().start("train")
    scenario.cluster.progress(job, 7, start_step=5)
    scenario.retry("once")
    return scenario.finish()


@given(
    st.dictionaries(
        st.sampled_from(OBJECTS),
        st.dictionaries(st.sampled_from(["xNew", "xMore"]), VALUES),
    )
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_unknown_fields_survive_read_report_and_write(unknown):
    scenario = finished_scenario()
    status = stored_status(scenario)
    for path, fields in unknown.items():
        at(status, path).update(fields)
    store(scenario, status)
    scenario.reconcile()
    assert stored_status(scenario) == status
    scenario.edit(
        evaluate={"gates": [{"task": "exam", "value": 0.65}]}
    )  # the stages stay, the gate and its condition change
    edited = stored_status(scenario)
    for path, fields in unknown.items():
        assert fields.items() <= at(edited, path).items(), path


def test_new_identity_keeps_unknown_fields_of_the_stage():
    scenario = finished_scenario()
    status = stored_status(scenario)
    at(status, "$.stages.train")["xNew"] = 7
    store(scenario, status)
    scenario.edit(train={"lora": {"rank": 4}})
    train = at(stored_status(scenario), "$.stages.train")
    assert train["xNew"] == 7
    assert train["state"] == "Queued"


def test_unknown_stage_stays_in_the_status():
    scenario = Scenario().run("prepare")
    status = stored_status(scenario)
    status["stages"].append(
        {
            "name": "distill",
            "state": "Dreaming",
            "reason": "NotRequested",
            "failures": 2,
        }
    )
    store(scenario, status)
    scenario.run("train")
    assert scenario.status.stages["distill"].failures == 2
    assert scenario.finish().status.phase == "Succeeded"


def test_unknown_reason_of_a_finished_attempt_is_kept():
    scenario = finished_scenario()
    status = stored_status(scenario)
    for path in ("$.stages.train.attempts.0", "$.stages.train.attempts.1"):
        at(status, path)["reason"] = "NodeDrained"
    store(scenario, status)
    scenario.reconcile()
    assert stored_status(scenario) == status
    reason = scenario.stage("train").attempts[0].reason
    assert (reason, str(reason), reason in set(Reason)) == (
        "NodeDrained",
        "NodeDrained",
        False,
    )


def test_unknown_reason_of_a_stop_still_stops_the_attempt():
    scenario = Scenario().run("prepare")
    job = scenario.start("train")
    status = stored_status(scenario)
    at(status, "$.stages.train.attempts.0")["stopping"] = "Preempted2"
    store(scenario, status)
    scenario.reconcile()
    assert scenario.cluster.jobs[job].asked_to_stop


def test_unknown_state_of_a_stage_is_recomputed_and_shown():
    scenario = finished_scenario()
    status = stored_status(scenario)
    at(status, "$.stages.train")["state"] = "Dreaming"
    store(scenario, status)
    assert stage_summary(
        scenario.stage("train").model_copy(update={"message": "zzz"})
    ).startswith("Dreaming")
    scenario.reconcile()
    assert scenario.stage("train").state is StageState.SUCCEEDED


def test_unknown_outcome_is_named_in_the_error():
    scenario = finished_scenario()
    status = stored_status(scenario)
    at(status, "$.stages.train.attempts.0")["outcome"] = "Paused"
    meta = {"namespace": "team", "name": "demo", "uid": "u", "generation": 1}
    with pytest.raises(InvalidObject, match=r"stages\.train\.attempts\[0\]\.outcome"):
        parse_pipeline(
            {
                "metadata": meta,
                "spec": json.loads(scenario.cluster.pipelines[scenario.key].spec),
                "status": status,
            }
        )


def message(**content) -> TerminationMessage:
    return TerminationMessage.model_validate_json(json.dumps(content))


def test_result_with_an_unknown_field_is_a_success():
    scenario = Scenario().run("prepare")
    job = scenario.start("train")
    result = {
        "stage": "train",
        "identity": scenario.attempt("train").identity,
        "digest": "d",
        **RESULTS["train"],
    }
    content = message(result={**result, "energyJoules": 3.5}, traceId="t").result
    scenario.cluster.complete(job, content)
    scenario.reconcile_until_stable()
    assert scenario.stage("train").state is StageState.SUCCEEDED
    assert at(stored_status(scenario), "$.stages.train.result")["energyJoules"] == 3.5


@pytest.mark.parametrize(
    "value",
    [2**70, float("nan"), float("inf"), [[2**70]], "x" * 5000, {"a": {"b": 1e300}}],
)
def test_unknown_field_that_is_not_storable_is_dropped(value):
    progress = Progress.model_validate_json(
        json.dumps(
            {
                "stage": "train",
                "updatedAt": "2030-01-01T00:00:00Z",
                "step": 3,
                "unknown": value,
            }
        )
    )
    assert "unknown" not in progress.model_dump()
    assert progress.step == 3


def test_deep_unknown_field_is_dropped():
    deep: list = []
    for _ in range(100):
        deep = [deep]
    failure = message(failure={"message": "m", "unknown": deep, "code": 7}).failure
    assert failure
    assert failure.model_extra == {"code": 7}


def test_json_without_a_known_field_is_no_termination_message():
    with pytest.raises(ValidationError, match="has none of result"):
        message(error="out of disk")
    text = '{"error": "out of disk"}'
    state = {
        "state": {"terminated": {"exitCode": 1, "message": text}},
        "name": "stage",
    }
    pod = ObservedPod(
        {
            "metadata": {"name": "p", "uid": "u"},
            "spec": {},
            "status": {"containerStatuses": [state]},
        }
    )
    assert pod.termination_message
    assert pod.termination_message.failure
    assert pod.termination_message.failure.message == text


def test_unknown_field_of_a_config_is_an_error():
    with pytest.raises(ValidationError, match="Extra inputs"):
        TrainConfig.model_validate({"identity": "i", "unknown": 1})


def test_stage_without_unknown_fields_equals_a_new_one():
    status = PipelineStatus.model_validate({"stages": [{"name": "train"}]})
    assert status.stages["train"] == StageStatus()


def test_stages_are_a_list_by_name_in_json_and_back():
    scenario = finished_scenario()
    status = stored_status(scenario)
    assert [stage["name"] for stage in status["stages"]] == list(ORDER)
    read = PipelineStatus.model_validate(status)
    assert read == scenario.status
    assert tuple(read.stages) == ORDER
    assert (
        json.loads(read.model_dump_json(by_alias=True, exclude_none=True))["stages"]
        == status["stages"]
    )


@pytest.mark.parametrize("stages", [[{"state": "Running"}], ["train"], [None]])
def test_entry_without_a_name_is_no_status(stages):
    with pytest.raises(
        ValidationError, match="every entry must be an object with a name"
    ):
        PipelineStatus.model_validate({"stages": stages})
