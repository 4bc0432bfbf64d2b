"""Pipelines under real Argo CD.

One cluster and one Argo CD for all tests, an Application for each. GITOPS=all adds tests.
"""

import json
import time
from functools import partial
from typing import Any

from e2e.gitops.application import (
    Application,
    application_set,
    example,
    template_with_trigger,
)
from e2e.gitops.argo_cd import CUSTOMIZATIONS, ArgoCD
from e2e.gitops.manifests import (
    LATER,
    failing,
    failing_once,
    gated,
    in_wave,
    unreadable,
)
from e2e.gitops.second_lane import more
from e2e.pipelines.driver import PipelineDriver, pipeline
from testcluster.kube_namespace import until

Object = dict[str, Any]


def object_of(driver: PipelineDriver) -> dict[str, Any]:
    return driver.object


def is_healthy(argo_cd: ArgoCD, name: str) -> bool:
    return argo_cd.states(name)[-1:] == [("Synced", "Healthy")]


def test_commit_creates_pipeline_that_becomes_healthy(application: Application):
    application.repository.commit({"bot.json": pipeline("bot", steps={"train": 10})})
    application.create()
    message = application.wait_health("bot", "Progressing")
    assert message
    application.wait("Synced", "Healthy")
    application.wait_recorded("Synced", "Healthy")
    assert application.states_since_sync == [
        ("Synced", "Progressing"),
        ("Synced", "Healthy"),
    ]
    assert application.pipeline("bot").status["phase"] == "Succeeded"
    assert len(application.status["history"]) == 1


def test_closed_gate_holds_the_next_wave_until_lowered(application: Application):
    application.namespace.claim("models")
    application.repository.commit(
        {"bot.json": in_wave(0, gated(0.95)), "later.json": in_wave(1, LATER)}
    )
    application.create()
    message = application.wait_health("bot", "Degraded")
    assert "0.95" in message
    until(lambda: application.operation.get("retryCount"), 60, application.describe)
    assert not application.namespace.get("configmap", "later")
    application.commit({"bot.json": in_wave(0, gated(0.5))})
    application.wait("Synced", "Healthy", 120)
    assert application.namespace.get("configmap", "later")


def test_failed_stage_is_degraded_until_retry(application: Application):
    application.repository.commit({"bot.json": failing_once()})
    application.create()
    message = application.wait_health("bot", "Degraded")
    assert "FAIL_WITH is set" in message
    assert application.actions("bot") == {"retry"}
    application.act("retry", "bot")
    application.wait("Synced", "Healthy")
    application.wait_recorded("Synced", "Healthy")
    healths = ("Progressing", "Degraded", "Progressing", "Healthy")
    assert application.states_since_sync == [("Synced", health) for health in healths]


def test_unreadable_pipeline_is_degraded_until_repaired(application: Application):
    application.repository.commit({"bot.json": unreadable()})
    application.create()
    assert "SpecInvalid" in application.wait_health("bot", "Degraded")
    assert application.actions("bot") == set()
    application.commit({"bot.json": pipeline("bot")})
    application.wait("Synced", "Healthy")


def test_actions_suspend_and_resume_where_git_is_silent(application: Application):
    application.repository.commit({"bot.json": pipeline("bot", steps={"train": 150})})
    application.create()
    application.pipeline("bot").wait_state("train", "Running")
    # Nothing waits for the last wave.
    until(
        lambda: application.operation["phase"] == "Succeeded", 30, application.describe
    )
    application.act("suspend", "bot")
    application.wait("Synced", "Suspended")
    assert application.actions("bot") == {"resume", "cancel"}
    time.sleep(8)  # longer than a comparison and a self-heal
    assert application.state == ("Synced", "Suspended")
    application.act("resume", "bot")
    application.wait("Synced", "Healthy")
    application.commit({"bot.json": pipeline("bot", seed=1, steps={"train": 900})})
    application.pipeline("bot").wait_state("train", "Running")
    application.act("cancel", "bot")
    application.wait("Synced", "Degraded")
    assert application.pipeline("bot").status["phase"] == "Cancelled"


@more
def test_suspend_in_git_wins_over_the_action(application: Application):
    def at(*, suspend: bool) -> Object:
        return {"bot.json": pipeline("bot", steps={"train": 150}, suspend=suspend)}

    application.repository.commit(at(suspend=False))
    application.create()
    driver = application.pipeline("bot")
    driver.wait_state("train", "Running")
    application.commit(at(suspend=True))
    application.wait("Synced", "Suspended")
    application.act("resume", "bot")
    until(
        lambda: (
            driver.object["spec"]["suspend"]
            and driver.object["metadata"]["generation"] == 4
        ),
        60,
    )
    application.wait("Synced", "Suspended")
    application.commit(at(suspend=False))
    application.wait("Synced", "Healthy")


@more
def test_retry_in_git_is_restored_after_the_button(application: Application):
    bot = failing()
    bot["metadata"]["annotations"] = {"finetune.dev/retry": "1"}
    application.repository.commit({"bot.json": bot})
    application.create()
    application.wait_health("bot", "Degraded")
    driver = application.pipeline("bot")

    def handled() -> str:
        return str(driver.status["observedAnnotations"]["retry"])

    assert handled() == "1"
    application.act("retry", "bot")
    until(lambda: handled() != "1", 10, application.describe)
    until(lambda: handled() == "1", 30, application.describe)
    application.wait("Synced", "Degraded")


def test_prune_deletes_pipelines_and_keeps_retained_claims(application: Application):
    brief = pipeline("brief", steps={"train": 900}, workspace={"whenDeleted": "Delete"})
    bot = pipeline("bot", steps={"train": 900})
    application.repository.commit(
        {"bot.json": bot, "brief.json": brief, "later.json": LATER}
    )
    application.create()
    for name in ("bot", "brief"):
        application.pipeline(name).wait_state("train", "Running")
    application.commit({"bot.json": None, "brief.json": None})
    until(
        lambda: application.namespace.run("get", "ft,jobs,pods", "-o", "name") == "",
        60,
        application.describe,
    )
    until(
        lambda: not application.namespace.get("pvc", "brief-workspace"),
        30,
        application.describe,
    )
    application.wait("Synced", "Healthy")
    assert (
        application.namespace.get("pvc", "bot-workspace")["metadata"].get(
            "deletionTimestamp"
        )
        is None
    )


@more
def test_last_pipeline_stays_until_its_application_is_deleted(application: Application):
    """An automated sync prunes no Application whole: the pipeline runs on without a manifest in Git."""
    application.repository.commit({"bot.json": pipeline("bot", steps={"train": 900})})
    application.create()
    application.pipeline("bot").wait_state("train", "Running")
    application.commit({"bot.json": None})

    def refused() -> bool:
        return "will wipe out all resources" in json.dumps(
            application.status.get("conditions")
        )

    until(refused, 60, application.describe)
    assert application.pipeline("bot").stage("train")["state"] == "Running"
    application.delete()
    assert not application.pipeline("bot").object


@more
def test_prune_with_confirm_asks_first(application: Application):
    bot = pipeline("bot")
    bot["metadata"]["annotations"] = {
        "argocd.argoproj.io/sync-options": "Prune=confirm"
    }
    application.repository.commit({"bot.json": bot, "later.json": LATER})
    application.create()
    application.wait("Synced", "Healthy")
    application.commit({"bot.json": None})
    until(
        lambda: "confirmation" in application.operation.get("message", ""),
        30,
        application.describe,
    )
    assert "deletionTimestamp" not in application.pipeline("bot").object["metadata"]
    application.argo_cd.command("app", "confirm-deletion", application.name)
    until(lambda: not application.pipeline("bot").object, 60, application.describe)
    application.wait("Synced", "Healthy")


@more
def test_expired_pipeline_runs_again_only_if_it_deletes_itself(
    application: Application,
):
    kept = pipeline("kept", ttlSecondsAfterFinished=3)
    deleted = pipeline("deleted", ttlSecondsAfterFinished=3, whenExpired="Delete")
    application.repository.commit({"kept.json": kept, "deleted.json": deleted})
    application.create()
    drivers = [application.pipeline(name) for name in ("kept", "deleted")]
    for driver in drivers:
        until(partial(object_of, driver), 60, application.describe)
    before = [driver.object["metadata"]["uid"] for driver in drivers]
    until(
        lambda: (
            drivers[1].object.get("metadata", {}).get("uid", before[1]) != before[1]
        ),
        60,
        application.describe,
    )
    drivers[1].wait_state("train", "Running", "Succeeded")
    until(
        lambda: "kept" not in application.namespace.run("get", "jobs", "-o", "name"),
        30,
        application.describe,
    )
    assert drivers[0].object["metadata"]["uid"] == before[0]
    assert (drivers[0].status["phase"], application.health("kept")["status"]) == (
        "Succeeded",
        "Healthy",
    )


@more
def test_hook_of_the_example_runs_after_each_sync(application: Application):
    hook = example("post-sync-hook")
    scripted = pipeline("unused", workspace=hook["spec"]["workspace"])["spec"]
    hook["spec"] = {
        **scripted,
        "ttlSecondsAfterFinished": 3,
        "whenExpired": hook["spec"]["whenExpired"],
    }
    application.repository.commit({"hook.json": hook, "later.json": LATER})
    application.create()
    until(
        lambda: application.namespace.run("get", "ft", "-o", "name"),
        60,
        application.describe,
    )
    assert application.operation["phase"] == "Running"
    until(
        lambda: application.operation["phase"] == "Succeeded", 60, application.describe
    )
    until(
        lambda: application.namespace.run("get", "ft,pvc", "-o", "name") == "",
        60,
        application.describe,
    )
    application.wait("Synced", "Healthy")
    application.commit({"later.json": {**LATER, "data": {"changed": "yes"}}})
    until(
        lambda: application.namespace.run("get", "ft", "-o", "name"),
        60,
        application.describe,
    )


def test_application_set_creates_an_application_per_run(application: Application):
    argo_cd = application.argo_cd
    namespace = application.namespace
    application.repository.commit(
        {f"runs/{name}/run.json": pipeline(name) for name in ("june", "july")}
    )
    manifest = application_set(application.repository, namespace)
    argo_cd.kube.apply([manifest])
    try:
        for name in ("june", "july"):
            until(
                partial(is_healthy, argo_cd, f"run-{name}"),
                90,
                argo_cd.logs,
            )
    finally:
        argo_cd.objects.run(
            "delete", "applicationset", manifest["metadata"]["name"], timeout=120
        )
    until(lambda: namespace.run("get", "ft", "-o", "name") == "", 60)


@more
def test_trigger_creates_a_run_from_the_template(
    application: Application, kubectl_image: str
):
    manifests = template_with_trigger(kubectl_image)
    application.repository.commit(
        {f"{kind}.json": manifest for kind, manifest in manifests.items()}
    )
    application.create()
    application.wait("Synced", "Healthy")

    def phases() -> str:
        return application.namespace.run(
            "get", "ft", "-o", "jsonpath={.items[*].status.phase}"
        )

    assert phases() == ""
    application.act("create-job", "support-bot", "CronJob")
    until(lambda: phases() == "Succeeded", 60, application.describe)
    until(
        lambda: application.namespace.run("get", "ft,pvc", "-o", "name") == "",
        60,
        application.describe,
    )
    assert set(application.states_since_sync) <= {
        ("Synced", "Progressing"),
        ("Synced", "Healthy"),
    }


@more
def test_next_wave_is_made_without_the_health_check(application: Application):
    """The negative control of the waves: Argo CD without deploy/argocd does not see the failure."""
    application.repository.commit(
        {"bot.json": in_wave(0, failing()), "later.json": in_wave(1, LATER)}
    )
    application.argo_cd.configure({})
    try:
        application.create()
        driver = application.pipeline("bot")
        until(lambda: driver.object, 60, application.describe)
        driver.wait_finished("Failed")
        application.wait("Synced", "Healthy")
        assert application.namespace.get("configmap", "later")
    finally:
        application.argo_cd.configure(CUSTOMIZATIONS)
    application.wait("Synced", "Degraded")
