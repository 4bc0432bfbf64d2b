"""The chart with one user's values or another's, rendered without a cluster."""

from typing import Any

import yaml

from e2e.pipelines.chart import CHART, NAMESPACE, RELEASE, helm

Object = dict[str, Any]
CLUSTER_WIDE: Object = {}
NAMESPACED: Object = {"namespaces": ["team-a", "team-b"], "userRoles": {"create": False}}
EVERYTHING: Object = {
    "image": {"repository": "registry.example/operator", "tag": "1.2.3", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "pull"}],
    "trainer": {"image": {"repository": "registry.example/trainer", "tag": "4.5.6"}},
    "vllm": {"image": {"repository": "registry.example/vllm", "tag": "7.8.9"}},
    "replicas": 3,
    "namespaces": ["team-a", "team-b"],
    "placement": {
        "onDemand": {"nodeSelector": {"capacity": "on-demand"}},
        "spot": {
            "nodeSelector": {"capacity": "spot"},
            "tolerations": [{"key": "cheap", "operator": "Exists", "effect": "NoExecute"}],
        },
        "pools": {"training": {"nodeSelector": {"workload": "training"}}},
    },
    "graceSeconds": 90,
    "crds": {"enabled": True, "keep": False},
    "userRoles": {"create": False},
    "serviceAccount": {"name": "robot", "annotations": {"cloud.example/role": "reader"}},
    "metrics": {
        "port": 9090,
        "serviceMonitor": {"enabled": True, "interval": "5s", "labels": {"watched-by": "prometheus"}},
    },
    "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
    "nodeSelector": {"workload": "control"},
    "tolerations": [{"key": "control", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "system-cluster-critical",
    "podAnnotations": {"scrape": "yes"},
    "podLabels": {"team": "platform"},
}
"""Every value there is, and none as it is by default; a test sees to that."""
VARIANTS = {"cluster-wide": CLUSTER_WIDE, "namespaced": NAMESPACED, "everything": EVERYTHING}


def text(values: Object, release: str = RELEASE, namespace: str = NAMESPACE) -> str:
    """Render what these values, given as a file, make of the chart."""
    where = ["--namespace", namespace, "--values", "-"]
    return helm("template", release, str(CHART), *where, given=yaml.safe_dump(values))


def rendered(values: Object, release: str = RELEASE, namespace: str = NAMESPACE) -> list[Object]:
    """Render it and read it."""
    return [one for one in yaml.safe_load_all(text(values, release, namespace)) if one]


def of(objects: list[Object], *kinds: str) -> list[Object]:
    """Pick the objects of some kinds."""
    return [one for one in objects if one["kind"] in kinds]


def the(objects: list[Object], kind: str) -> Object:
    """Pick the only object of a kind."""
    (found,) = of(objects, kind)
    return found


def pod(objects: list[Object]) -> Object:
    """Give the template of the operator's pod."""
    template: Object = the(objects, "Deployment")["spec"]["template"]
    return template


def container(objects: list[Object]) -> Object:
    """Give the pod's only container."""
    (found,) = pod(objects)["spec"]["containers"]
    return dict(found)
