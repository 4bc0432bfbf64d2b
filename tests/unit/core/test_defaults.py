"""Defaults of the operator and of a namespace: they are for the next attempt, and in no hash."""

import pytest
from pydantic import ValidationError
from support.operator.scenario import ORDER, UID, Scenario, a_pipeline

from finetune_operator.api.conditions import Reason
from finetune_operator.api.defaults import NO_DEFAULTS, Defaults
from finetune_operator.core.observation import Blocker
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.core.settings import Settings
from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes.resources.claim import build_claim
from finetune_operator.kubernetes.translate.defaults import KEY, NONE, read_defaults

UNUSABLE = Blocker(
    Reason.SPEC_INVALID,
    "the ConfigMap finetune-defaults of this namespace cannot be used: why",
)


def queue(name: str) -> Defaults:
    return Defaults.model_validate({"podDefaults": {"priorityClassName": name}})


def scenario_with(
    namespace: Defaults = NO_DEFAULTS, operator: Defaults = NO_DEFAULTS, **changes
) -> Scenario:
    scenario = Scenario(a_pipeline(**changes), settings=Settings(defaults=operator))
    scenario.cluster.defaults = namespace
    return scenario


def priority(scenario: Scenario, stage: str) -> str | None:
    """Return the priority class of the stage's newest Job."""
    return scenario.cluster.jobs[
        scenario.attempt(stage).job
    ].template.pod.priority_class_name


LEVELS = {
    "operator": ({}, NO_DEFAULTS, queue("operator"), "operator"),
    "namespace over operator": ({}, queue("namespace"), queue("operator"), "namespace"),
    "pipeline over both": (
        {"podDefaults": {"priorityClassName": "pipeline"}}, queue("namespace"), queue("operator"), "pipeline"
    ),
    "stage over all": (
        {"podDefaults": {"priorityClassName": "pipeline"}, "train": {"pod": {"priorityClassName": "stage"}}},
        queue("namespace"), queue("operator"), "stage",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "namespace", "operator", "expected"), LEVELS.values(), ids=LEVELS
)
def test_nearest_level_decides(changes, namespace, operator, expected):
    scenario = scenario_with(namespace, operator, **changes).run("prepare")
    scenario.start("train")
    assert priority(scenario, "train") == expected


def test_defaults_are_in_no_hash():
    plain = scenario_with().finish()
    other = scenario_with(queue("low"), queue("high")).finish()
    for stage in ORDER:
        assert priority(other, stage) == "low"
        hashes = [
            (scenario.attempt(stage).identity, scenario.attempt(stage).execution)
            for scenario in (plain, other)
        ]
        assert hashes[0] == hashes[1]


@pytest.mark.parametrize("stage", ORDER)
def test_changed_defaults_leave_the_attempt_and_reach_the_next(stage):
    scenario = scenario_with(queue("old")).run_before(stage)
    job = scenario.start(stage)
    scenario.cluster.defaults = queue("new")
    scenario.reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop
    assert priority(scenario, stage) == "old"
    scenario.cluster.evict(job, step=5, saved=5)
    scenario.pass_interruption_backoff()
    assert priority(scenario, stage) == "new"
    assert scenario.attempt(stage).number == 2


@pytest.mark.parametrize(
    ("own", "expected"), [({}, "fast"), ({"storageClassName": "own"}, "own")]
)
def test_claim_gets_the_default_storage_class(own, expected):
    fast = Defaults.model_validate({"workspace": {"storageClassName": "fast"}})
    scenario = scenario_with(fast, workspace=own).reconcile_until_stable()
    assert list(scenario.cluster.claims.values()) == [expected]
    pipeline = Pipeline(scenario.key, UID, 1, scenario.spec)
    assert build_claim(pipeline, "fast")["spec"]["storageClassName"] == expected


def test_changed_defaults_rerun_nothing_that_is_finished():
    scenario = scenario_with().finish()
    before = scenario.created_jobs
    scenario.cluster.defaults = queue("new")
    scenario.settings = Settings(defaults=queue("newer"))
    scenario.reconcile_until_stable()
    assert scenario.created_jobs == before
    assert scenario.status.phase == "Succeeded"


def test_unusable_defaults_hold_the_next_attempt_only():
    scenario = scenario_with().run("prepare")
    job = scenario.start("train")
    scenario.cluster.defaults_blocker = UNUSABLE
    scenario.reconcile_until_stable()
    assert not scenario.cluster.jobs[job].asked_to_stop
    scenario.complete("train")
    assert scenario.stage("train").state == "Succeeded"
    stage = scenario.stage("evaluate")
    assert (stage.state, stage.reason, stage.message) == (
        "Pending",
        "SpecInvalid",
        UNUSABLE.message,
    )
    ready = next(
        condition
        for condition in scenario.status.conditions
        if condition.type == "Ready"
    )
    assert (ready.status, ready.reason) == ("False", "SpecInvalid")
    assert ready.message.startswith(f"evaluate: {UNUSABLE.message} (see ")
    scenario.cluster.defaults_blocker = None
    assert scenario.finish().status.phase == "Succeeded"


def test_unusable_defaults_hold_a_recorded_attempt():
    """The operator was killed between the write of the attempt and the creation of its Job."""
    scenario = scenario_with()

    def kill(moment: str) -> None:
        if moment == "before apply":
            raise ClusterError(moment)

    scenario.cluster.inject_fault = kill
    with pytest.raises(ClusterError):
        scenario.reconcile()
    scenario.cluster.inject_fault = lambda _moment: None
    scenario.cluster.defaults_blocker = UNUSABLE
    scenario.reconcile_until_stable()
    assert scenario.created_jobs == []
    assert scenario.stage("prepare").message == UNUSABLE.message
    scenario.cluster.defaults_blocker = None
    assert scenario.finish().status.phase == "Succeeded"


def read(text: str):
    return read_defaults({"data": {KEY: text}})


def test_config_map_is_read():
    answer = read(
        "podDefaults:\n  priorityClassName: low\nworkspace: {storageClassName: fast}\n"
    )
    assert answer.blocker is None
    assert answer.defaults.pod_defaults.priority_class_name == "low"
    assert answer.defaults.workspace.storage_class_name == "fast"
    assert read("") == read("{}") == NONE


BROKEN = {
    "misspelt": ("podDefauts: {}", r"defaults\.yaml: podDefauts"),
    "wrong value": (
        "podDefaults: {priorityClassName: '?'}",
        r"podDefaults\.priorityClassName",
    ),
    "of a stage": ("train: {}", r"defaults\.yaml: train"),
    "reserved": (
        "podDefaults: {env: [{name: FINETUNE_CONFIG, value: x}]}",
        "FINETUNE_",
    ),
    "two gpus": (
        "podDefaults: {resources: {limits: {nvidia.com/gpu: 2}}}",
        "more than one accelerator",
    ),
    "no mapping": ("[]", "dictionary"),
    "no YAML": ("a: [", "expected"),
    "alias": (
        "podDefaults: {labels: &a {}, annotations: *a}",
        r"an alias \(\*name\) is not allowed",
    ),
    "tag": ("podDefaults: !!python/object:os.system {}", "tag"),
    "deep": ("[" * 3000, "recursion|expected|dictionary"),
    "long": ("#" * 40_000, "40,000 characters: write at most"),
}


@pytest.mark.parametrize(("text", "error"), BROKEN.values(), ids=BROKEN)
def test_unusable_config_map_names_its_field(text, error):
    answer = read(text)
    assert answer.defaults == NO_DEFAULTS
    assert answer.blocker
    assert answer.blocker.message.startswith(
        "the ConfigMap finetune-defaults of this namespace cannot be used: "
    )
    with pytest.raises(AssertionError, match=f"(?s){error}"):
        raise AssertionError(answer.blocker.message)


def test_config_map_with_another_key_is_unusable():
    answer = read_defaults({"data": {"default.yaml": "{}"}})
    assert answer.blocker
    assert (
        "has the keys default.yaml: write one key, defaults.yaml"
        in answer.blocker.message
    )


def test_program_is_no_default():
    with pytest.raises(ValidationError, match=r"podDefaults\.image"):
        Defaults.model_validate({"podDefaults": {"image": "x"}})
