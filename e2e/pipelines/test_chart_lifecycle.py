"""The chart is upgraded, taken away, put back and narrowed down while pipelines run: their work does not notice."""

import os
from collections.abc import Iterator

import pytest

from e2e.pipelines.chart import Operator
from e2e.pipelines.driver import PipelineDriver, pipeline
from testcluster import fixtures
from testcluster.kube_namespace import KubeNamespace, Object, temporary_namespace, until

LONG = {"train": 200}


@pytest.fixture
def release(operator: Operator, namespace: KubeNamespace) -> Iterator[Operator]:
    """The release that all tests share, for one that changes it: it is as it was before the test's namespace goes."""
    if os.environ.get("FINETUNE_OPERATOR") == "running":
        pytest.skip("the operator that runs is not this run's own: its release is left alone")
    yield operator
    operator.install()
    settle(operator)


@pytest.fixture
def elsewhere(namespace: KubeNamespace, request: pytest.FixtureRequest) -> Iterator[KubeNamespace]:
    """Another namespace."""
    with temporary_namespace(namespace.kube, fixtures.namespace_name(f"{request.node.name}-elsewhere")) as made:
        yield made


def settle(operator: Operator) -> None:
    """Wait until two replicas are there and one of them leads: pods of an earlier release may take a while to end."""
    until(lambda: len(operator.pods()) == 2 and operator.leader() in operator.pods(), 60, operator.logs)


def at_work(story: PipelineDriver) -> tuple[Object, Object]:
    """Give the Job and the pod of the training that runs."""
    story.wait_state("train", "Running", seconds=90)
    pod = story.pod("train").partition("/")[2]
    return story.jobs("train")[0], story.namespace.get("pod", pod)


def uids(story: PipelineDriver, *objects: Object) -> list[str]:
    """Look the same objects up again by name; empty where one is gone."""
    now = (story.namespace.get(one["kind"], one["metadata"]["name"]) for one in objects)
    return [one.get("metadata", {}).get("uid", "") for one in now]


def own(*objects: Object) -> list[str]:
    return [one["metadata"]["uid"] for one in objects]


def assert_nothing_ran_twice(story: PipelineDriver) -> None:
    for stage in ("prepare", "train", "evaluate"):
        assert [one["outcome"] for one in story.stage(stage)["attempts"]] == ["Succeeded"], story.told()
        assert len(story.jobs(stage)) == 1
    assert (story.status["interruptions"], story.stage("train")["failures"]) == (0, 0)


def test_an_upgrade_replaces_the_replicas_and_not_what_runs(release: Operator, namespace: KubeNamespace):
    story = PipelineDriver.start(namespace, pipeline("upgraded", steps=LONG))
    job, pod = at_work(story)
    before = set(release.pods())
    release.install("podAnnotations.release=next")
    until(lambda: before.isdisjoint(release.pods()), 60, release.logs)
    assert namespace.phase(pod["metadata"]["name"]) == "Running"
    story.wait_finished(seconds=120)
    assert uids(story, job, pod) == own(job, pod)
    assert_nothing_ran_twice(story)


def test_what_runs_outlives_the_chart_and_its_result_is_found_afterwards(release: Operator, namespace: KubeNamespace):
    story = PipelineDriver.start(namespace, pipeline("orphaned", steps=LONG))
    job, pod = at_work(story)
    mine = story.object
    release.uninstall()
    until(lambda: not release.pods(), 60)
    assert uids(story, mine, job, pod) == own(mine, job, pod)  # crds.keep: the definition stayed, and all with it
    assert namespace.phase(pod["metadata"]["name"]) == "Running"

    namespace.run("wait", "--for=condition=Complete", "--timeout=120s", f"job/{job['metadata']['name']}", timeout=130)
    assert story.stage("train")["state"] == "Running"  # so it was last seen: nobody has looked since
    assert story.jobs("evaluate") == []

    release.install()
    story.wait_finished(seconds=120)
    assert uids(story, mine, job, pod) == own(mine, job, pod)
    assert_nothing_ran_twice(story)


def test_an_operator_of_one_namespace_leaves_the_others_alone(
    release: Operator, namespace: KubeNamespace, elsewhere: KubeNamespace
):
    before = set(release.pods())
    release.install(f"namespaces={{{namespace.name}}}", "userRoles.create=false")
    until(lambda: before.isdisjoint(release.pods()), 60, release.logs)
    settle(release)
    for kind in ("clusterrole", "clusterrolebinding"):
        assert namespace.kube.run("get", kind, "-l", "app.kubernetes.io/name=finetune-operator", "-o", "name") == ""

    foreign = PipelineDriver.start(elsewhere, pipeline("foreign"))
    near = PipelineDriver.start(namespace, pipeline("near"))
    near.wait_finished()  # in that time the other one would long have begun
    assert "phase" not in foreign.status
    assert elsewhere.run("get", "jobs,pods,pvc", "-o", "name") == ""

    release.install()
    foreign.wait_finished(seconds=120)
    assert near.status["phase"] == "Succeeded"
    assert_nothing_ran_twice(foreign)
    assert_nothing_ran_twice(near)
