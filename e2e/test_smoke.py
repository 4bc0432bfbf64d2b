"""Smoke tests of the cluster: nodes, volumes, DNS, API access from pods, Pod Security, the image registry."""

import pytest

from testcluster.errors import TimedOut
from testcluster.images import image_layers, oci
from testcluster.kube_namespace import KubeNamespace, pod, temporary_namespace, until
from testcluster.provider import Provider
from testcluster.volume_provisioner import STRICT

READ_SERVICE_ACCOUNT = """
from kubernetes import client, config
config.load_incluster_config()
print(client.CoreV1Api().read_namespaced_service_account("default", open(
    "/var/run/secrets/kubernetes.io/serviceaccount/namespace").read()).metadata.name)
"""


def test_pods_run_on_on_demand_and_spot_nodes(namespace: KubeNamespace):
    for capacity in ("on-demand", "spot"):
        name = f"on-{capacity}"
        assert (
            namespace.run_script(
                "echo $((6*7))", name, selector={"finetune.dev/capacity": capacity}
            ).strip()
            == "42"
        )
        node = namespace.get("pod", name)["spec"]["nodeName"]
        assert (
            namespace.get("node", node)["metadata"]["labels"]["finetune.dev/capacity"]
            == capacity
        )


def test_pod_without_toleration_is_not_scheduled_on_spot(namespace: KubeNamespace):
    intolerant = pod("intolerant", "true", selector={"finetune.dev/capacity": "spot"})
    del intolerant["spec"]["tolerations"]
    namespace.create(intolerant)
    conditions = until(
        lambda: namespace.get("pod", "intolerant")["status"].get("conditions"), 60
    )
    assert conditions[0]["reason"] == "Unschedulable"
    assert "untolerated taint" in conditions[0]["message"]


def test_volume_keeps_data_for_a_pod_on_another_node(namespace: KubeNamespace):
    namespace.claim("data")
    namespace.run_script(
        "echo kept > /data/file", "writer", node="spot-1", claims={"data": "/data"}
    )
    namespace.run("delete", "pod", "writer")
    assert (
        namespace.run_script(
            "busybox cat /data/file", "reader", node="spot-2", claims={"data": "/data"}
        )
        == "kept\n"
    )


def test_strict_volume_admits_one_pod_at_a_time(namespace: KubeNamespace):
    namespace.claim("single", "ReadWriteOncePod", STRICT)
    namespace.create(
        pod("first", "busybox sleep 600", claims={"single": "/data"}, grace=1)
    )
    namespace.wait_phase("first", "Running")
    namespace.create(pod("second", "true", claims={"single": "/data"}))
    conditions = until(
        lambda: namespace.get("pod", "second")["status"].get("conditions"), 60
    )
    assert "ReadWriteOncePod" in conditions[0]["message"]
    namespace.run("delete", "pod", "first", "--now")
    assert namespace.wait_phase("second", "Succeeded", seconds=90) == "Succeeded"


def test_strict_class_refuses_other_modes_with_an_event(namespace: KubeNamespace):
    namespace.claim("wide", "ReadWriteMany", STRICT)
    event = until(lambda: namespace.get("event", "wide.refused"), 60)
    assert event["reason"] == "ProvisioningFailed"
    assert "ReadWriteOncePod" in event["message"]


def test_service_name_resolves_from_another_node(namespace: KubeNamespace):
    namespace.create(
        pod(
            "server",
            "while true; do echo here | busybox nc -l -p 8080; done",
            node="spot-1",
            grace=1,
        )
        | {"metadata": {"name": "server", "labels": {"app": "server"}}},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "server"},
            "spec": {
                "selector": {"app": "server"},
                "ports": [{"port": 80, "targetPort": 8080}],
            },
        },
    )
    namespace.wait_phase("server", "Running")
    name = f"server.{namespace.name}.svc.cluster.local"
    request = f"for i in $(busybox seq 60); do busybox nc -w 2 {name} 80 && break; busybox sleep 1; done"
    assert namespace.run_script(request, "client", node="spot-2").strip() == "here"


def test_operator_image_reads_api_with_service_account(namespace: KubeNamespace):
    namespace.create(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": {"name": "reader"},
            "rules": [
                {"apiGroups": [""], "resources": ["serviceaccounts"], "verbs": ["get"]}
            ],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "reader"},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "Role",
                "name": "reader",
            },
            "subjects": [
                {
                    "kind": "ServiceAccount",
                    "name": "default",
                    "namespace": namespace.name,
                }
            ],
        },
        pod(
            "reader",
            "",
            image="finetune-operator:dev",
            command=["python", "-c", READ_SERVICE_ACCOUNT],
        ),
    )
    namespace.wait_phase("reader", "Succeeded", "Failed")
    assert namespace.run("logs", "reader").strip() == "default"


def test_privileged_pod_is_refused_by_pod_security(namespace: KubeNamespace):
    privileged = pod("privileged", "true")
    privileged["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    with pytest.raises(TimedOut, match="violates PodSecurity"):
        namespace.create(privileged)


def test_image_pushed_to_the_registry_is_pulled_by_a_node(
    cluster: Provider, namespace: KubeNamespace
):
    layer = image_layers.layer(
        {"bin/busybox": image_layers.busybox(), "bin/sh": image_layers.busybox()}
    )
    # The config must differ from the toolbox image's: containerd treats images with equal configs as one image and
    # drops the first one's name.
    config = image_layers.config([layer], ["/bin/busybox", "sh"])
    image = oci.push(cluster.registry, "tools/box", "1", config, [layer])
    namespace.create(pod("pulled", "busybox echo pulled", image=image, pull="Always"))
    namespace.wait_phase("pulled", "Succeeded", "Failed")
    assert namespace.run("logs", "pulled").strip() == "pulled"


def test_name_outside_the_cluster_is_not_resolved(cluster: Provider):
    with temporary_namespace(cluster.kube, "outside-name") as namespace:
        namespace.create(pod("lookup", "busybox nslookup example.com"))
        assert namespace.wait_phase("lookup", "Succeeded", "Failed") == "Failed"
