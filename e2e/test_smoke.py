"""The cluster is a cluster: nodes, volumes, names, the API from inside, Pod Security, images from a registry."""

import pytest

from testcluster.errors import TimedOut
from testcluster.images import oci, packing
from testcluster.kube_namespace import KubeNamespace, pod, temporary_namespace, until
from testcluster.provider import Provider
from testcluster.volume_provisioner import STRICT

ASK_THE_API = """
from kubernetes import client, config
config.load_incluster_config()
print(client.CoreV1Api().read_namespaced_service_account("default", open(
    "/var/run/secrets/kubernetes.io/serviceaccount/namespace").read()).metadata.name)
"""


def test_pods_run_on_both_classes_of_nodes(namespace: KubeNamespace):
    for capacity in ("on-demand", "spot"):
        name = f"on-{capacity}"
        assert namespace.run_script("echo $((6*7))", name, selector={"finetune.dev/capacity": capacity}).strip() == "42"
        node = namespace.get("pod", name)["spec"]["nodeName"]
        assert namespace.get("node", node)["metadata"]["labels"]["finetune.dev/capacity"] == capacity


def test_a_spot_node_takes_only_pods_that_tolerate_it(namespace: KubeNamespace):
    shy = pod("shy", "true", selector={"finetune.dev/capacity": "spot"})
    del shy["spec"]["tolerations"]
    namespace.create(shy)
    told = until(lambda: namespace.get("pod", "shy")["status"].get("conditions"), 20)
    assert told[0]["reason"] == "Unschedulable"
    assert "untolerated taint" in told[0]["message"]


def test_a_volume_outlives_its_pod_and_follows_to_another_node(namespace: KubeNamespace):
    namespace.claim("data")
    namespace.run_script("echo kept > /data/word", "writes", node="spot-1", claims={"data": "/data"})
    namespace.run("delete", "pod", "writes")
    assert namespace.run_script("busybox cat /data/word", "reads", node="spot-2", claims={"data": "/data"}) == "kept\n"


def test_a_strict_volume_is_one_pods_at_a_time(namespace: KubeNamespace):
    namespace.claim("single", "ReadWriteOncePod", STRICT)
    namespace.create(pod("first", "busybox sleep 600", claims={"single": "/data"}, grace=1))
    namespace.wait_phase("first", "Running")
    namespace.create(pod("second", "true", claims={"single": "/data"}))
    refused = until(lambda: namespace.get("pod", "second")["status"].get("conditions"), 20)
    assert "ReadWriteOncePod" in refused[0]["message"]
    namespace.run("delete", "pod", "first", "--now")
    assert namespace.wait_phase("second", "Succeeded", seconds=90) == "Succeeded"


def test_a_strict_class_says_why_it_refuses_other_modes(namespace: KubeNamespace):
    namespace.claim("wide", "ReadWriteMany", STRICT)
    event = until(lambda: namespace.get("event", "wide.refused"), 20)
    assert event["reason"] == "ProvisioningFailed"
    assert "ReadWriteOncePod" in event["message"]


def test_services_have_names(namespace: KubeNamespace):
    namespace.create(
        pod("server", "while true; do echo here | busybox nc -l -p 8080; done", node="spot-1", grace=1)
        | {"metadata": {"name": "server", "labels": {"app": "server"}}},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "server"},
            "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8080}]},
        },
    )
    namespace.wait_phase("server", "Running")
    name = f"server.{namespace.name}.svc.cluster.local"
    ask = f"for i in 1 2 3 4 5 6 7 8 9 10; do busybox nc -w 2 {name} 80 && break; busybox sleep 1; done"
    assert namespace.run_script(ask, "asks", node="spot-2").strip() == "here"


def test_the_operators_image_reads_the_api_with_its_service_account(namespace: KubeNamespace):
    namespace.create(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": {"name": "reader"},
            "rules": [{"apiGroups": [""], "resources": ["serviceaccounts"], "verbs": ["get"]}],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "reader"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"},
            "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": namespace.name}],
        },
        pod("asks", "", image="finetune-operator:dev", command=["python", "-c", ASK_THE_API]),
    )
    namespace.wait_phase("asks", "Succeeded", "Failed")
    assert namespace.run("logs", "asks").strip() == "default"


def test_a_restricted_namespace_refuses_a_privileged_pod(namespace: KubeNamespace):
    bold = pod("bold", "true")
    bold["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    with pytest.raises(TimedOut, match="violates PodSecurity"):
        namespace.create(bold)


def test_an_image_that_was_pushed_to_the_registry_is_pulled_from_it(cluster: Provider, namespace: KubeNamespace):
    layer = packing.layer({"bin/busybox": packing.busybox(), "bin/sh": packing.busybox()})
    # With a config of its own: containerd takes two images with one config for one, and forgets the first one's name.
    config = packing.config([layer], ["/bin/busybox", "sh"])
    image = oci.push(cluster.registry, "tools/box", "1", config, [layer])
    namespace.create(pod("pulled", "busybox echo pulled", image=image, pull="Always"))
    namespace.wait_phase("pulled", "Succeeded", "Failed")
    assert namespace.run("logs", "pulled").strip() == "pulled"


def test_a_name_without_a_cluster_behind_it_is_not_resolved(cluster: Provider):
    with temporary_namespace(cluster.kube, "lost") as namespace:
        namespace.create(pod("asks", "busybox nslookup example.com"))
        assert namespace.wait_phase("asks", "Succeeded", "Failed") == "Failed"
