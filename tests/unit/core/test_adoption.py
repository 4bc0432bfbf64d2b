"""An upgrade or a rollback of the operator changes nothing that has begun."""

import json
from datetime import datetime, timedelta
from typing import Any

import pytest
from support.operator.scenario import Scenario, a_pipeline
from support.operator.stored_objects import changes, corpus, training

from finetune_operator.api.spec import PipelineSpec
from finetune_operator.api.status import PipelineStatus
from finetune_operator.core import adoption, identity, report
from finetune_operator.core.assess import assess
from finetune_operator.core.attempts import history
from finetune_operator.core.observation import (
    JobState,
    Observation,
    ObservedJob,
    ObservedServer,
)
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.core.planning import plan as planning
from finetune_operator.core.planning.plan import Plan, plan_next
from finetune_operator.core.settings import Settings
from finetune_trainer.contract import RESULTS_VERSION

STORED = corpus()
SETTINGS = Settings()
NEXT = RESULTS_VERSION + 1


def time_of(text: str) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def pipeline_of(entry: dict[str, Any]) -> Pipeline:
    return Pipeline(
        Key("team", "demo"),
        "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0",
        entry["generation"],
        PipelineSpec.model_validate(entry["spec"]),
        PipelineStatus.model_validate(entry["status"]),
        annotations=entry["annotations"],
    )


def observation_of(entry: dict[str, Any]) -> Observation:
    jobs = {
        job["name"]: ObservedJob(
            job["name"],
            JobState[job["state"]],
            time_of(job["createdAt"]),
            time_of(job["startedAt"]),
            stage=job["stage"],
        )
        for job in entry["jobs"]
    }
    servers = {
        job: ObservedServer(**fields) for job, fields in entry["servers"].items()
    }
    return Observation(jobs, servers, has_service=bool(servers))


def decide(entry: dict[str, Any], pipeline: Pipeline) -> tuple[Plan, PipelineStatus]:
    now = datetime.fromisoformat(entry["now"]) + timedelta(seconds=1)
    assessment = assess(pipeline, observation_of(entry), now)
    plan = plan_next(pipeline, assessment, SETTINGS, now)
    status = report.report(
        pipeline, assessment, plan, now, SETTINGS.troubleshooting_url
    )
    return plan, status


def use_results_version(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Make this program a version of the operator whose trainer has these results."""
    for module in (adoption, identity, history, planning):
        monkeypatch.setattr(module, "RESULTS_VERSION", number)
    for module in (report, adoption):
        monkeypatch.setattr(module, "release", lambda: f"results-{number}")


@pytest.fixture(params=[RESULTS_VERSION, NEXT])
def newer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """This version, and a next version whose trainer has other results."""
    use_results_version(monkeypatch, request.param)


@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize(
    ("version", "entry"),
    STORED,
    ids=[f"{version}-{entry['name']}" for version, entry in STORED],
)
def test_stored_pipeline_is_left_alone(version: str, entry: dict[str, Any]) -> None:
    plan, status = decide(entry, pipeline_of(entry))
    assert [
        action for action in plan.actions if type(action).__name__ != "StopJob"
    ] == []
    # A Job that was being stopped before the upgrade is asked again.
    assert bool(plan.actions) == (entry["name"] == "stopping")
    assert changes(entry, PipelineStatus.model_validate(entry["status"]), status) == []


@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize(
    ("version", "entry"),
    [(version, entry) for version, entry in STORED if entry["generation"] > 1],
    ids=[
        f"{version}-{entry['name']}"
        for version, entry in STORED
        if entry["generation"] > 1
    ],
)
def test_pipeline_of_a_backup_is_left_alone(
    version: str, entry: dict[str, Any]
) -> None:
    """A restored object begins at generation 1 again, with the status of a later generation."""
    plan, status = decide(entry, pipeline_of({**entry, "generation": 1}))
    starts = [action for action in plan.actions if type(action).__name__ != "StopJob"]
    assert starts == []
    before = PipelineStatus.model_validate(entry["status"])
    for name, stage in status.stages.items():
        assert stage.result == before.stages[name].result
        assert stage.state == before.stages[name].state


@pytest.mark.parametrize(
    ("version", "entry"),
    [(version, entry) for version, entry in STORED if entry["name"] == "serving"],
)
def test_edit_after_an_upgrade_reruns_what_it_concerns(
    version: str, entry: dict[str, Any]
) -> None:
    pipeline = pipeline_of(entry)
    _, adopted = decide(entry, pipeline)
    spec = json.loads(json.dumps(entry["spec"]))
    states = {}
    for field, value in (("suspend", True), ("evaluate", {"compareWithBase": True})):
        spec[field] = spec.get(field, {}) | value if isinstance(value, dict) else value
        entry_edited = {**entry, "spec": spec, "generation": entry["generation"] + 1}
        edited = pipeline_of(
            {
                **entry_edited,
                "status": adopted.model_dump(mode="json", by_alias=True),
            }
        )
        _, status = decide(entry_edited, edited)
        states[field] = [name for name, stage in status.stages.items() if stage.result]
    assert states["suspend"] == ["prepare", "train", "evaluate", "push", "deploy"]
    assert states["evaluate"][:2] == ["prepare", "train"]
    assert "evaluate" not in states["evaluate"]


@pytest.mark.parametrize("keeps_images", [True, False])
def test_stage_that_has_begun_keeps_its_image_or_begins_anew(
    *, keeps_images: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster can run the earlier trainer; a local run has only the installed trainer."""
    scenario = Scenario(settings=Settings(trainer_cpu_image="trainer:1"))
    scenario.run("prepare")
    scenario.cluster.evict(scenario.start("train"), step=5, saved=5)
    identity_before = scenario.reconcile_until_stable().stage("train").identity
    job = scenario.start("train")
    use_results_version(monkeypatch, NEXT)
    scenario.settings = Settings(trainer_cpu_image="trainer:2")
    scenario.cluster.keeps_images = keeps_images
    scenario.cluster.evict(job, step=7, saved=7)
    scenario.pass_interruption_backoff()
    stage = scenario.stage("train")
    template = scenario.cluster.jobs[scenario.attempt("train").job].template
    assert (stage.identity == identity_before) is keeps_images
    assert template.image == ("trainer:1" if keeps_images else "trainer:2")


def test_spec_that_no_operator_has_read_is_not_adopted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The edit has a field that only the next version knows. The present version says that it cannot read it."""
    scenario = Scenario().finish()
    stored = scenario.cluster.pipelines[scenario.key]
    scenario.spec = a_pipeline(seed=7)
    scenario.cluster.edit(scenario.key, scenario.spec)
    unread = report.unreadable_status(
        "a newer field", stored.generation, scenario.cluster.now, "", stalled=False
    )
    stored.status = json.dumps(json.loads(stored.status) | unread)
    use_results_version(monkeypatch, NEXT)
    scenario.reconcile_until_stable()
    assert scenario.created_jobs[-1] == "prepare-a2"


def test_stage_that_has_not_begun_gets_the_name_of_this_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have other values in this version, which must not get the name of the values before."""
    scenario = Scenario().run("prepare")
    before = scenario.stage("evaluate").identity
    use_results_version(monkeypatch, NEXT)
    scenario.reconcile_until_stable()
    assert scenario.stage("evaluate").identity != before


def test_retry_stops_no_attempt_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = training(Scenario())
    use_results_version(monkeypatch, NEXT)
    scenario.retry("1")
    assert scenario.running == "train"
    assert scenario.attempt("train").stopping is None


def test_earlier_trainer_gets_the_config_that_it_began_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would refuse a field that only the later version knows."""
    scenario = training(Scenario())
    job = scenario.cluster.jobs[scenario.attempt("train").job]
    use_results_version(monkeypatch, NEXT)
    scenario.edit(train={"checkpoint": {"everySeconds": 30}})
    scenario.cluster.evict(job.template.name, step=9, saved=9)
    scenario.pass_interruption_backoff()
    later = scenario.cluster.jobs[scenario.attempt("train").job]
    assert later.template.name != job.template.name
    assert later.template.env == job.template.env


def test_config_of_a_newer_version_stops_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a rollback, the earlier version cannot read what the newer version has begun."""
    scenario = training(Scenario())
    stored = scenario.cluster.pipelines[scenario.key]
    stored.status = stored.status.replace(
        '{\\"identity', '{\\"newer\\": 1, \\"identity'
    )
    assert "newer" in stored.status
    use_results_version(monkeypatch, RESULTS_VERSION)
    scenario.reconcile_until_stable()
    assert scenario.attempt("train").stopping is None
