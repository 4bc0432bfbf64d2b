"""Render the chart with several sets of values, without a cluster."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from e2e.pipelines.chart import CHART, NAMESPACE, RELEASE, helm
from finetune_operator import __main__ as operator

Object = dict[str, Any]
DIGEST = f"sha256:{'a' * 64}"
RESTRICTED_POD: Object = {
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
RESTRICTED_CONTAINER: Object = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
"""What Pod Security "restricted" asks for."""
CLUSTER_WIDE: Object = {}
NAMESPACED: Object = {
    "namespaces": ["team-a", "team-b"],
    "userRoles": {"create": False},
}
EVERYTHING: Object = {
    "fullnameOverride": "tuner",
    "image": {
        "registry": "registry.example",
        "repository": "team/operator",
        "tag": "1.2.3",
        "digest": DIGEST,
        "pullPolicy": "Always",
    },
    "imagePullSecrets": [{"name": "pull"}],
    "trainer": {
        "image": {
            "registry": "registry.example",
            "repository": "trainer",
            "tag": "4.5.6",
            "digest": DIGEST,
        },
        "cpuImage": {
            "registry": "other.example",
            "repository": "cpu",
            "tag": "4.5.7",
            "digest": DIGEST,
        },
    },
    "vllm": {
        "image": {
            "registry": "registry.example",
            "repository": "vllm",
            "tag": "7.8.9",
            "digest": DIGEST,
        }
    },
    "replicaCount": 3,
    "namespaces": ["team-a", "team-b"],
    "defaults": {
        "podDefaults": {"priorityClassName": "batch"},
        "workspace": {"storageClassName": "fast"},
    },
    "trustedCAs": {"configMap": "company-ca", "key": "bundle.pem"},
    "proxy": {
        "http": "http://proxy.example:3128",
        "https": "http://proxy.example:3129",
        "noProxy": [".corp.example"],
    },
    "placement": {
        "onDemand": {"nodeSelector": {"capacity": "on-demand"}},
        "spot": {
            "nodeSelector": {"capacity": "spot"},
            "tolerations": [
                {"key": "cheap", "operator": "Exists", "effect": "NoExecute"}
            ],
        },
        "pools": {"training": {"nodeSelector": {"workload": "training"}}},
        "preset": "karpenter",
        "nodeClasses": [
            {
                "name": "h100-spot",
                "capacity": "Spot",
                "accelerator": "nvidia.com/gpu",
                "price": "0.80",
            }
        ],
        "currency": "EUR",
        "shortStageSeconds": 600,
        "restartSeconds": 60,
        "returnSeconds": 900,
        "priceConfigMap": "gpu-prices",
    },
    "interruptionNotices": {"metadata": "EC2", "nodes": False},
    "nodeLost": {"replaceAfterSeconds": 600},
    "graceSeconds": 90,
    "jobHistory": 7,
    "workers": 15,
    "apiRateLimit": {"qps": 50.5, "burst": 70},
    "logging": {"level": "debug", "format": "text"},
    "troubleshootingUrl": "https://wiki.example/troubleshooting",
    "crds": {"enabled": True, "keep": False, "policy": False},
    "argocd": {"customizations": True, "namespace": "gitops", "configMap": "gitops-cm"},
    "userRoles": {"create": False},
    "jobMetadata": {
        "labels": {
            "sidecar.istio.io/inject": "true",
            "kuma.io/sidecar-injection": "enabled",
        },
        "annotations": {
            "linkerd.io/inject": "enabled",
            "consul.hashicorp.com/connect-inject": "true",
        },
    },
    "admissionPolicy": {
        "images": ["registry.example/team/*"],
        "enabled": "auto",
        "deniedNamespaces": ["kube-system", "kube-public"],
    },
    "flowSchemas": {"enabled": "auto", "priorityLevel": "operators"},
    "serviceAccount": {
        "create": True,
        "name": "robot",
        "annotations": {"cloud.example/role": "reader"},
    },
    "metrics": {
        "port": 9090,
        "serviceMonitor": {
            "enabled": True,
            "interval": "5s",
            "labels": {"watched-by": "prometheus"},
        },
        "podMonitor": {
            "enabled": True,
            "interval": "7s",
            "labels": {"watched-by": "prometheus"},
        },
        "prometheusRule": {
            "enabled": True,
            "labels": {"watched-by": "prometheus"},
            "runbookUrl": "https://wiki.example/alerts",
            "waitingMinutes": 15,
            "interruptionsPerHour": 3,
            "gpuUsePercent": 80,
        },
        "dashboards": {
            "enabled": True,
            "labels": {"grafana_dashboard": "yes"},
            "annotations": {"grafana_folder": "Training"},
        },
    },
    "resources": {
        "requests": {"cpu": "100m", "memory": "256Mi"},
        "limits": {"memory": "1Gi"},
    },
    "nodeSelector": {"workload": "control"},
    "tolerations": [{"key": "control", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "system-cluster-critical",
    "podAnnotations": {"scrape": "yes"},
    "podLabels": {"team": "platform"},
    "commonLabels": {"cost-center": "ml", "team": "all"},
    "podSecurity": {"setUser": True},
    "podSecurityContext": {**RESTRICTED_POD, "runAsUser": 1000, "runAsGroup": 1000},
    "containerSecurityContext": RESTRICTED_CONTAINER,
    "extraArgs": ["--lease-namespace=leases"],
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"}],
    "networkPolicy": {
        "enabled": True,
        "metricsFrom": [{"podSelector": {}}],
        "apiServerPorts": [8443],
        "egress": [
            {
                "to": [{"ipBlock": {"cidr": "192.0.2.8/32"}}],
                "ports": [{"protocol": "TCP", "port": 3128}],
            }
        ],
        "stages": {
            "egress": [
                {
                    "to": [
                        {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8"]}}
                    ],
                    "ports": [{"protocol": "TCP", "port": 443}],
                }
            ],
            "fromOperator": True,
            "namespaces": ["team-b"],
        },
    },
    "podDisruptionBudget": {"enabled": True, "maxUnavailable": "50%"},
}
"""Every value of the chart, each different from its default, except if the default switches a part on."""
VARIANTS = {
    "cluster-wide": CLUSTER_WIDE,
    "namespaced": NAMESPACED,
    "everything": EVERYTHING,
}
every_variant = pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)


def render_text(
    values: Object, release: str = RELEASE, namespace: str = NAMESPACE, *more: str
) -> str:
    """Return the chart rendered with a values file, as YAML; `more` are options of helm.

    Raises TimedOut with helm's error message.
    """
    options = ["--namespace", namespace, "--values", "-", *more]
    return helm("template", release, str(CHART), *options, given=yaml.safe_dump(values))


def render(
    values: Object, release: str = RELEASE, namespace: str = NAMESPACE
) -> list[Object]:
    """Return the objects of the chart rendered with a values file."""
    return [
        manifest
        for manifest in yaml.safe_load_all(render_text(values, release, namespace))
        if manifest
    ]


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    """Return the objects of some kinds."""
    return [manifest for manifest in objects if manifest["kind"] in kinds]


def names(objects: list[Object], *kinds: str) -> set[str]:
    """Return the names of all objects of the kinds."""
    return {manifest["metadata"]["name"] for manifest in of_kind(objects, *kinds)}


def grants(roles: list[Object]) -> Iterator[tuple[str, str, str]]:
    """Yield API group, resource and verb of every right that the roles grant."""
    for rule in (rule for role in roles for rule in role["rules"]):
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                yield from ((group, resource, verb) for verb in rule["verbs"])


def only(objects: list[Object], kind: str) -> Object:
    """Return the only object of a kind; raises ValueError if there are none or several."""
    (manifest,) = of_kind(objects, kind)
    return manifest


def is_monitoring(manifest: Object) -> bool:
    """Return whether an object is of the Prometheus Operator, whose CRDs are not part of Kubernetes."""
    return str(manifest["apiVersion"]).startswith("monitoring.coreos.com/")


def pod(objects: list[Object]) -> Object:
    """Return the pod template of the operator's Deployment."""
    template: Object = only(objects, "Deployment")["spec"]["template"]
    return template


def container(objects: list[Object]) -> Object:
    """Return the only container of that pod template."""
    (operator,) = pod(objects)["spec"]["containers"]
    return dict(operator)


def options(objects: list[Object]) -> dict[str, str]:
    """Return the options of that container that are given once: name, without dashes, and value."""
    pairs = (
        argument.removeprefix("--").partition("=")
        for argument in container(objects)["args"]
    )
    return {name: value for name, _, value in pairs if name != "namespace"}


def parsed_options(objects: list[Object]) -> Any:
    """Return the container's arguments as the operator's process parses them."""
    return operator._options(operator._parser().parse_args(container(objects)["args"]))
