"""Sync operations of real Argo CD that pipelines hold up, retry or end.

All tests need GITOPS=all, so the usual run starts no cluster for this file.
"""

import time
from typing import Any

from e2e.gitops.application import Application, example
from e2e.gitops.manifests import LATER, OTHER, failing, failing_once, gated, in_wave
from e2e.gitops.second_lane import more
from e2e.pipelines.driver import pipeline
from testcluster.kube_namespace import until

Object = dict[str, Any]
FAILING_HOOK = {
    "hook.json": {**example("post-sync-hook"), "spec": failing()["spec"]},
    "later.json": LATER,
}


@more
def test_wave_without_refresh_is_retried_with_the_old_commit(application: Application):
    application.namespace.claim("models")
    application.repository.commit(
        {"bot.json": in_wave(0, gated(0.95)), "later.json": in_wave(1, LATER)}
    )
    application.create(retry={"limit": 3, "backoff": {"duration": "5s", "factor": 1}})
    application.wait_health("bot", "Degraded")
    application.commit({"bot.json": in_wave(0, gated(0.5))})
    until(
        lambda: application.operation.get("retryCount") == 3, 60, application.describe
    )
    assert application.generations == {"bot": 1}
    application.wait(
        "Synced", "Healthy", 120
    )  # the new commit is synced after the last retry


@more
def test_wave_after_the_last_retry_waits_for_a_sync(application: Application):
    """Argo CD does not sync a commit again by itself that it failed to sync, though the pipeline is Healthy now."""
    application.repository.commit(
        {"bot.json": in_wave(0, failing_once()), "later.json": in_wave(1, LATER)}
    )
    application.create(retry={"limit": 0})
    until(
        lambda: application.operation.get("phase") == "Failed", 60, application.describe
    )
    application.act("retry", "bot")
    application.wait_health("bot", "Healthy")
    time.sleep(8)  # longer than a comparison and a self-heal
    assert application.state[0] == "OutOfSync"
    assert not application.namespace.get("configmap", "later")
    application.argo_cd.command("app", "sync", application.name)
    application.wait("Synced", "Healthy")
    assert application.namespace.get("configmap", "later")


@more
def test_suspended_pipeline_holds_its_wave_until_resumed(application: Application):
    bot = in_wave(0, pipeline("bot", steps={"train": 150}))
    application.repository.commit({"bot.json": bot, "later.json": in_wave(1, LATER)})
    application.create()
    application.pipeline("bot").wait_state("train", "Running")
    application.act("suspend", "bot")
    application.wait_health("bot", "Suspended")
    application.commit({"other.json": OTHER})
    time.sleep(8)  # longer than a comparison
    assert application.operation["phase"] == "Running"
    assert not application.namespace.get("configmap", "later")
    assert not application.namespace.get("configmap", "other")
    application.act("resume", "bot")
    application.wait("Synced", "Healthy")
    until(
        lambda: application.namespace.get("configmap", "other"),
        30,
        application.describe,
    )
    assert application.namespace.get("configmap", "later")


@more
def test_application_is_deleted_when_its_operation_has_ended(application: Application):
    bot = in_wave(0, pipeline("bot", suspend=True))
    application.repository.commit({"bot.json": bot, "later.json": in_wave(1, LATER)})
    application.create()
    application.wait_health("bot", "Suspended")
    application.argo_cd.objects.run(
        "delete", "application", application.name, "--wait=false"
    )
    time.sleep(8)  # longer than a comparison
    assert application.pipeline("bot").object
    application.argo_cd.command("app", "terminate-op", application.name)
    until(lambda: not application.object, 60, application.describe)
    assert not application.pipeline("bot").object


@more
def test_terminated_operation_deletes_its_running_hook(application: Application):
    """Until then the hook holds the operation, and so the later commit, which takes the hook out."""
    spec = pipeline(
        "unused", steps={"train": 900}, workspace={"whenDeleted": "Delete"}
    )["spec"]
    application.repository.commit(
        {"hook.json": {**example("post-sync-hook"), "spec": spec}, "later.json": LATER}
    )
    application.create()
    [hook] = until(lambda: application.pipelines, 60, application.describe)
    application.pipeline(hook["name"]).wait_state("train", "Running")
    application.commit({"hook.json": None, "other.json": OTHER})
    time.sleep(8)  # longer than a comparison
    assert not application.namespace.get("configmap", "other")
    application.argo_cd.command("app", "terminate-op", application.name)
    until(
        lambda: application.namespace.run("get", "ft,pvc", "-o", "name") == "",
        60,
        application.describe,
    )
    until(
        lambda: application.namespace.get("configmap", "other"),
        60,
        application.describe,
    )


@more
def test_failed_hook_without_retries_stays_as_its_record(application: Application):
    application.repository.commit(FAILING_HOOK)
    application.create(retry={"limit": 0})
    [hook] = until(lambda: application.pipelines, 60, application.describe)
    until(lambda: application.operation["phase"] == "Failed", 90, application.describe)
    time.sleep(8)  # longer than a comparison and a self-heal
    assert [metadata["uid"] for metadata in application.pipelines] == [hook["uid"]]
    assert application.pipeline(hook["name"]).status["phase"] == "Failed"


@more
def test_retried_sync_deletes_the_failed_hook_and_trains_again(
    application: Application,
):
    """The example's Application retries. A retry keeps the start of its sync, which is part of the hook's name."""
    application.repository.commit(FAILING_HOOK)
    application.create()
    [first] = until(lambda: application.pipelines, 60, application.describe)

    def others() -> list[Object]:
        return [hook for hook in application.pipelines if hook["uid"] != first["uid"]]

    [second] = until(others, 90, application.describe)
    assert second["name"] == first["name"]
    assert application.operation["retryCount"]
