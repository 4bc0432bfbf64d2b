"""The API server puts the operator's requests into the queues that the chart's FlowSchemas name."""

import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
import yaml
from support.operator.charts import NAMESPACED, Object, of_kind, render, render_text
from support.operator.operator_process import delete_objects

from e2e.pipelines.chart import RELEASE
from testcluster.kube_namespace import KubeNamespace, temporary_namespace, until
from testcluster.provider import Provider

OWN = "flow-operator"
"""Namespace of the release."""
KIND = "FlowSchema"
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{OWN}/leases/{RELEASE}"
PODS = "/api/v1/pods"


@pytest.fixture(scope="module")
def own(control_plane: Provider) -> Iterator[KubeNamespace]:
    """The namespace of a release whose account and FlowSchemas are installed."""
    objects = of_kind(render({}, namespace=OWN), "ServiceAccount", KIND)
    with temporary_namespace(control_plane.kube, OWN) as created:
        created.kube.apply(objects)
        yield created
    delete_objects(control_plane.kube, objects)


def flow_of(own: KubeNamespace, account: str, path: str) -> str:
    """Return the uid of the FlowSchema that the API server has chosen for a request, which may be forbidden."""
    config = yaml.safe_load(own.kube.kubeconfig.read_text())
    server = config["clusters"][0]["cluster"]["server"]
    token = own.run("create", "token", account).strip()
    request = urllib.request.Request(
        f"{server}{path}", headers={"Authorization": f"Bearer {token}"}
    )
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with urllib.request.urlopen(request, context=context) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as error:
        headers = error.headers
    return str(headers["X-Kubernetes-PF-FlowSchema-UID"])


@pytest.mark.parametrize(
    ("path", "kind", "level"),
    [(LEASE, "lease", "leader-election"), (PODS, "requests", "workload-high")],
    ids=["lease", "other"],
)
def test_request_of_the_operator_has_its_own_queue(
    own: KubeNamespace, path: str, kind: str, level: str
):
    name = f"{kind}.{RELEASE}.{OWN}"
    schema = own.kube.json("get", KIND, name)
    assert schema["spec"]["priorityLevelConfiguration"]["name"] == level
    until(lambda: flow_of(own, RELEASE, path) == schema["metadata"]["uid"], 30)


def test_request_of_another_account_has_not(own: KubeNamespace):
    uids = {
        schema["metadata"]["uid"]
        for schema in own.kube.json("get", KIND)["items"]
        if OWN in schema["metadata"]["name"]
    }
    assert len(uids) == 2
    assert flow_of(own, "default", PODS) not in uids


@pytest.mark.parametrize("values", [{}, NAMESPACED], ids=["cluster-wide", "namespaced"])
def test_flow_schemas_name_the_account_of_the_deployment(values: Object):
    more = {"serviceAccount": {"name": "robot"}}
    objects = of_kind(render(values | more, namespace=OWN), KIND)
    accounts = [
        rule["subjects"][0]["serviceAccount"]
        for schema in objects
        for rule in schema["spec"]["rules"]
    ]
    assert accounts == [{"name": "robot", "namespace": OWN}] * 2


@pytest.mark.parametrize(
    ("enabled", "versions", "rendered"),
    [
        ("auto", ("v1/Pod", "flowcontrol.apiserver.k8s.io/v1/FlowSchema"), True),
        ("auto", ("v1/Pod",), False),
        ("auto", (), True),
        (True, ("v1/Pod",), True),
        (False, (), False),
    ],
)
def test_flow_schemas_follow_value_and_api_server(enabled, versions, rendered):
    more = [option for version in versions for option in ("--api-versions", version)]
    values = {"flowSchemas": {"enabled": enabled}}
    text = render_text(values, RELEASE, OWN, *more)
    assert (f"kind: {KIND}" in text) is rendered
