"""The cluster is a cluster: nodes, volumes, names, the API from inside, Pod Security, images from a registry."""

import pytest

from testcluster.errors import NotReady
from testcluster.images import oci, packing
from testcluster.kube_namespace import World, namespace, pod, until
from testcluster.provider import Provider
from testcluster.volume_provisioner import STRICT

ASK_THE_API = """
from kubernetes import client, config
config.load_incluster_config()
print(client.CoreV1Api().read_namespaced_service_account("default", open(
    "/var/run/secrets/kubernetes.io/serviceaccount/namespace").read()).metadata.name)
"""


def test_pods_run_on_both_classes_of_nodes(world: World):
    for capacity in ("on-demand", "spot"):
        name = f"on-{capacity}"
        assert world.say("echo $((6*7))", name, selector={"finetune.dev/capacity": capacity}).strip() == "42"
        node = world.get("pod", name)["spec"]["nodeName"]
        assert world.get("node", node)["metadata"]["labels"]["finetune.dev/capacity"] == capacity


def test_a_spot_node_takes_only_pods_that_tolerate_it(world: World):
    shy = pod("shy", "true", selector={"finetune.dev/capacity": "spot"})
    del shy["spec"]["tolerations"]
    world.create(shy)
    told = until(lambda: world.get("pod", "shy")["status"].get("conditions"), 20)
    assert told[0]["reason"] == "Unschedulable"
    assert "untolerated taint" in told[0]["message"]


def test_a_volume_outlives_its_pod_and_follows_to_another_node(world: World):
    world.claim("data")
    world.say("echo kept > /data/word", "writes", node="spot-1", claims={"data": "/data"})
    world.run("delete", "pod", "writes")
    assert world.say("busybox cat /data/word", "reads", node="spot-2", claims={"data": "/data"}) == "kept\n"


def test_a_strict_volume_is_one_pods_at_a_time(world: World):
    world.claim("single", "ReadWriteOncePod", STRICT)
    world.create(pod("first", "busybox sleep 600", claims={"single": "/data"}, grace=1))
    world.wait_phase("first", "Running")
    world.create(pod("second", "true", claims={"single": "/data"}))
    refused = until(lambda: world.get("pod", "second")["status"].get("conditions"), 20)
    assert "ReadWriteOncePod" in refused[0]["message"]
    world.run("delete", "pod", "first", "--now")
    assert world.wait_phase("second", "Succeeded", seconds=90) == "Succeeded"


def test_a_strict_class_says_why_it_refuses_other_modes(world: World):
    world.claim("wide", "ReadWriteMany", STRICT)
    event = until(lambda: world.get("event", "wide.refused"), 20)
    assert event["reason"] == "ProvisioningFailed"
    assert "ReadWriteOncePod" in event["message"]


def test_services_have_names(world: World):
    world.create(
        pod("server", "while true; do echo here | busybox nc -l -p 8080; done", node="spot-1", grace=1)
        | {"metadata": {"name": "server", "labels": {"app": "server"}}},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "server"},
            "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8080}]},
        },
    )
    world.wait_phase("server", "Running")
    name = f"server.{world.namespace}.svc.cluster.local"
    ask = f"for i in 1 2 3 4 5 6 7 8 9 10; do busybox nc -w 2 {name} 80 && break; busybox sleep 1; done"
    assert world.say(ask, "asks", node="spot-2").strip() == "here"


def test_the_operators_image_reads_the_api_with_its_service_account(world: World):
    world.create(
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
            "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": world.namespace}],
        },
        pod("asks", "", image="finetune-operator:dev", command=["python", "-c", ASK_THE_API]),
    )
    world.wait_phase("asks", "Succeeded", "Failed")
    assert world.run("logs", "asks").strip() == "default"


def test_a_restricted_namespace_refuses_a_privileged_pod(world: World):
    bold = pod("bold", "true")
    bold["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    with pytest.raises(NotReady, match="violates PodSecurity"):
        world.create(bold)


def test_an_image_that_was_pushed_to_the_registry_is_pulled_from_it(cluster: Provider, world: World):
    layer = packing.layer({"bin/busybox": packing.busybox(), "bin/sh": packing.busybox()})
    # With a config of its own: containerd takes two images with one config for one, and forgets the first one's name.
    config = packing.config([layer], ["/bin/busybox", "sh"])
    image = oci.push(cluster.registry, "tools/box", "1", config, [layer])
    world.create(pod("pulled", "busybox echo pulled", image=image, pull="Always"))
    world.wait_phase("pulled", "Succeeded", "Failed")
    assert world.run("logs", "pulled").strip() == "pulled"


def test_a_name_without_a_cluster_behind_it_is_not_resolved(cluster: Provider):
    with namespace(cluster.kube, "lost") as world:
        world.create(pod("asks", "busybox nslookup example.com"))
        assert world.wait_phase("asks", "Succeeded", "Failed") == "Failed"
