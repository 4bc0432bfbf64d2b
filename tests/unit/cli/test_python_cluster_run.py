"""`finetune.Pipeline.apply` and `finetune.get` against a fake API server."""

import pytest

import finetune


def test_pipeline_of_a_cluster_has_status_scores_and_card(cli, scenario):
    scenario.finish()
    run = finetune.get("demo").wait()
    assert run.status.phase == "Succeeded"
    assert run.scores["exam"]
    assert [row["step"] for row in run.metrics()] == sorted(
        row["step"] for row in run.metrics()
    )
    assert "srcdoc=" in run._repr_html_()
    assert "team/demo: Succeeded" in repr(run)


def test_apply_changes_the_pipeline_as_planned(cli, scenario):
    pipeline = finetune.Pipeline.from_yaml(cli.write(seed=5))
    plan = pipeline.plan(namespace="team")
    assert plan.change == "would be changed"
    assert scenario.generation == 1
    run = pipeline.apply(namespace="team")
    assert scenario.generation == 2
    assert run.status.stages["prepare"].identity == plan.stages[0].identity
    assert pipeline.plan(namespace="team").change == "unchanged"


def test_apply_keeps_what_the_next_kubectl_apply_compares_with(cli, scenario):
    cli.api.last_applied[next(iter(cli.api.scenarios))] = {"spec": {"seed": 3}}
    finetune.Pipeline.from_yaml(cli.write(seed=5)).apply(namespace="team")
    stored = scenario.cluster.pipelines[scenario.key].annotations
    assert '"seed": 5' in stored["kubectl.kubernetes.io/last-applied-configuration"]


def test_stop_suspends_the_pipeline(cli, scenario):
    finetune.get("demo", namespace="team").stop()
    [key] = cli.api.scenarios
    assert cli.api.pipeline(key)["spec"]["suspend"]


def test_runs_here_and_there_are_compared(cli, scenario):
    scenario.finish()
    run = finetune.get("demo")
    again = finetune.get("demo", context="here")
    differences = run.compare(again).to_json()["differences"]
    assert {entry["difference"] for entry in differences} == {0}


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        ({"namespace": "team"}, "did you mean demo?"),
        ({"context": "unreachable"}, "unreachable"),
        ({"context": "nowhere"}, "there is no context nowhere"),
    ],
)
def test_what_a_cluster_lacks_is_an_error(cli, scenario, selection, words):
    with pytest.raises((finetune.UsageError, finetune.ClusterError), match=words):
        finetune.get("demos", **selection)


def test_apply_without_a_kubeconfig_names_it(cli, monkeypatch):
    monkeypatch.setattr(
        "kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", "nowhere"
    )
    pipeline = finetune.Pipeline.from_yaml(cli.write())
    with pytest.raises(finetune.UsageError, match="no kubeconfig at nowhere"):
        pipeline.apply()
