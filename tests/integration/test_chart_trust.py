"""The chart's values trustedCAs and proxy reach the pods of every stage, and are part of no identity."""

import pytest
from support.operator.built_objects import built_objects
from support.operator.charts import parsed_options, render
from support.operator.scenario import ALL_STAGES, merged

from testcluster.errors import TimedOut

VALUES = {
    "trustedCAs": {"configMap": "company-ca", "key": "bundle.pem"},
    "proxy": {
        "http": "http://proxy.example:3128",
        "https": "http://proxy.example:3129",
        "noProxy": [".corp.example", "mlflow.ml"],
    },
}
CERTIFICATES = "/etc/finetune/trusted-cas/ca.crt"
STAGES = ("prepare", "train", "evaluate", "push", "deploy")
STORE = {"push": {"targets": [{"uri": "s3://models/demo"}]}}
"""The server's pod downloads the model."""


def workloads(values, **changes):
    """Return the Jobs and the Deployment of a pipeline, by an operator with these values of its chart."""
    settings = parsed_options(render(values)).settings
    spec = merged(ALL_STAGES, merged(STORE, changes))
    manifest = {"metadata": {"name": "demo"}, "spec": spec}
    return built_objects(manifest, "team", settings).workloads


def containers(workload):
    """Return the containers of the pods that reach another host."""
    pod = workload["spec"]["template"]["spec"]
    return pod.get("initContainers") or pod["containers"]


def variables(container):
    return {entry["name"]: entry.get("value") for entry in container["env"]}


@pytest.mark.parametrize("stage", STAGES)
def test_certificates_and_proxy_reach_every_stage(stage):
    workload = workloads(VALUES)[stage]
    pod = workload["spec"]["template"]["spec"]
    [volume] = [entry for entry in pod["volumes"] if entry["name"] == "trusted-cas"]
    items = [{"key": "bundle.pem", "path": "ca.crt"}]
    assert volume["configMap"] == {"name": "company-ca", "items": items}
    for container in containers(workload):
        env = variables(container)
        for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE"):
            assert env[name] == CERTIFICATES
        assert env["HTTP_PROXY"] == "http://proxy.example:3128"
        assert env["HTTPS_PROXY"] == "http://proxy.example:3129"
        hosts = env["NO_PROXY"].split(",")
        assert {"localhost", ".svc", ".cluster.local", "mlflow.ml"} <= set(hosts)
        [mount] = [
            mount
            for mount in container["volumeMounts"]
            if mount["name"] == "trusted-cas"
        ]
        assert (mount["mountPath"], mount["readOnly"]) == (
            "/etc/finetune/trusted-cas",
            True,
        )


def test_values_change_no_identity():
    """They are defaults of the next attempt: the config of a stage, which has the identity, has none of them."""
    with_values = workloads(VALUES)
    without = workloads({})
    for stage in STAGES[:-1]:
        configs = [
            variables(containers(jobs[stage])[0])["FINETUNE_CONFIG"]
            for jobs in (with_values, without)
        ]
        assert configs[0] == configs[1]
        assert "HTTP_PROXY" not in variables(containers(without[stage])[0])


def test_variable_of_the_defaults_and_of_a_stage_wins():
    own = [{"name": "HTTPS_PROXY", "value": "http://other:1"}]
    values = {**VALUES, "defaults": {"podDefaults": {"env": own}}}
    train = {"pod": {"env": [{"name": "NO_PROXY", "value": "*"}]}}
    env = variables(containers(workloads(values, train=train)["train"])[0])
    assert env["HTTPS_PROXY"] == "http://other:1"
    assert env["NO_PROXY"] == "*"
    assert env["HTTP_PROXY"] == "http://proxy.example:3128"


def test_proxy_alone_sets_no_certificates():
    values = {"proxy": {"https": "http://proxy.example:3128"}}
    job = workloads(values)["train"]
    env = variables(containers(job)[0])
    assert "HTTPS_PROXY" in env
    assert not {"HTTP_PROXY", "SSL_CERT_FILE"} & env.keys()
    volumes = job["spec"]["template"]["spec"]["volumes"]
    assert "trusted-cas" not in [volume["name"] for volume in volumes]


def test_other_defaults_stay_as_they_are():
    own = {
        "podDefaults": {"priorityClassName": "batch"},
        "workspace": {"storageClassName": "fast"},
    }
    settings = parsed_options(render({**VALUES, "defaults": own})).settings
    assert settings.defaults.pod_defaults.priority_class_name == "batch"
    assert settings.defaults.workspace.storage_class_name == "fast"


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"proxy": {"http": "http://me:secret@proxy:1"}}, "/proxy/http'"),
        ({"proxy": {"https": "proxy:3128"}}, "/proxy/https'"),
        ({"proxy": {"noProxy": ["a,b"]}}, "/proxy/noProxy/0'"),
        ({"proxy": {"noProxy": ["a"]}}, "noProxy: has no effect without"),
        ({"trustedCAs": {"configMap": "Company CA"}}, "/trustedCAs/configMap'"),
        ({"trustedCAs": {"configMap": "a", "key": "../a"}}, "/trustedCAs/key'"),
        ({"trustedCAs": {"pem": "-----BEGIN"}}, "'pem' not allowed"),
    ],
)
def test_mistake_in_these_values_is_refused_by_its_path(values, error):
    with pytest.raises(TimedOut, match=error):
        render(values)
