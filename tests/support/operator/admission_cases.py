"""Changes that the chart's admission policies refuse or allow to the operator, each with the name of its rule."""

from collections.abc import Callable
from typing import Any

Object = dict[str, Any]
PIPELINE = {
    "apiVersion": "finetune.dev/v1alpha1",
    "kind": "FineTunePipeline",
    "name": "p",
    "uid": "1",
}
CONFIG_MAP = {"apiVersion": "v1", "kind": "ConfigMap", "name": "missing", "uid": "2"}
OTHER = {"app": "other"}
"""A Job without any label would get the labels of its pods."""
TOKEN = {"serviceAccountToken": {"path": "token"}}
PRIVILEGED = {"privileged": True, "allowPrivilegeEscalation": True}
INIT = {
    "name": "init",
    "image": "x",
    "securityContext": {**PRIVILEGED, "capabilities": {"drop": ["ALL"]}},
}
Change = Callable[[Object], object]


def container(pod: Object) -> Object:
    return pod["containers"][0]


def add_volume(**source: Object) -> Change:
    return lambda pod: pod["volumes"].append({"name": "more", **source})


def add_init_container(name: str, image: str) -> Change:
    def add(pod: Object) -> None:
        context = container(pod)["securityContext"]
        added = {"name": name, "image": image, "securityContext": context}
        pod["initContainers"] = [added]

    return add


def add_block_device(pod: Object) -> None:
    claim = {"persistentVolumeClaim": {"claimName": "disk"}}
    add_volume(**claim)(pod)
    container(pod)["volumeDevices"] = [{"name": "more", "devicePath": "/dev/disk"}]


IMAGE_BY_TAG = add_volume(image={"reference": "registry.test/team/bot:latest"})
HOSTILE_PODS: dict[str, tuple[str, Change]] = {
    "token mounted": (
        "token",
        lambda pod: pod.update(automountServiceAccountToken=True),
    ),
    "token by default": ("token", lambda pod: pod.pop("automountServiceAccountToken")),
    "projected token": ("volume", add_volume(projected={"sources": [TOKEN]})),
    "projected token and secret": (
        "volume",
        add_volume(projected={"sources": [{"secret": {"name": "key"}}, TOKEN]}),
    ),
    "host path": ("volume", add_volume(hostPath={"path": "/etc"})),
    "image by tag": ("volume", IMAGE_BY_TAG),
    "nfs volume": ("volume", add_volume(nfs={"server": "10.0.0.1", "path": "/"})),
    "host network": ("host", lambda pod: pod.update(hostNetwork=True)),
    "host processes": ("host", lambda pod: pod.update(hostPID=True)),
    "host ipc": ("host", lambda pod: pod.update(hostIPC=True)),
    "host port": (
        "host",
        lambda pod: container(pod).update(
            ports=[{"containerPort": 80, "hostPort": 80}]
        ),
    ),
    "node by name": ("host", lambda pod: pod.update(nodeName="control-plane")),
    "privileged": (
        "privilege",
        lambda pod: container(pod)["securityContext"].update(PRIVILEGED),
    ),
    "escalation": (
        "privilege",
        lambda pod: container(pod)["securityContext"].pop("allowPrivilegeEscalation"),
    ),
    "capability": (
        "privilege",
        lambda pod: container(pod)["securityContext"].update(
            capabilities={"drop": ["ALL"], "add": ["SYS_ADMIN"]}
        ),
    ),
    "capabilities kept": (
        "privilege",
        lambda pod: container(pod)["securityContext"].pop("capabilities"),
    ),
    "no security context": (
        "privilege",
        lambda pod: container(pod).pop("securityContext"),
    ),
    "privileged init container": (
        "privilege",
        lambda pod: pod.update(initContainers=[INIT]),
    ),
    "root allowed": ("root", lambda pod: pod["securityContext"].pop("runAsNonRoot")),
    "root user": ("root", lambda pod: pod["securityContext"].update(runAsUser=0)),
    "root container": (
        "root",
        lambda pod: container(pod)["securityContext"].update(runAsUser=0),
    ),
    "root container allowed": (
        "root",
        lambda pod: container(pod)["securityContext"].update(runAsNonRoot=False),
    ),
    "root group": ("root", lambda pod: pod["securityContext"].update(runAsGroup=0)),
    "root group of volumes": (
        "root",
        lambda pod: pod["securityContext"].update(fsGroup=0),
    ),
    "more groups": (
        "root",
        lambda pod: pod["securityContext"].update(supplementalGroups=[6]),
    ),
    "root group of a container": (
        "root",
        lambda pod: container(pod)["securityContext"].update(runAsGroup=0),
    ),
    "selinux of the pod": (
        "confinement",
        lambda pod: pod["securityContext"].update(seLinuxOptions={"type": "spc_t"}),
    ),
    "selinux of a container": (
        "confinement",
        lambda pod: container(pod)["securityContext"].update(
            seLinuxOptions={"level": "s0:c1"}
        ),
    ),
    "no apparmor": (
        "confinement",
        lambda pod: pod["securityContext"].update(
            appArmorProfile={"type": "Unconfined"}
        ),
    ),
    "apparmor of the node": (
        "confinement",
        lambda pod: container(pod)["securityContext"].update(
            appArmorProfile={"type": "Localhost", "localhostProfile": "mine"}
        ),
    ),
    "seccomp of the node": (
        "seccomp",
        lambda pod: pod["securityContext"].update(
            seccompProfile={"type": "Localhost", "localhostProfile": "mine.json"}
        ),
    ),
    "sysctl": (
        "kernel",
        lambda pod: pod["securityContext"].update(
            sysctls=[{"name": "kernel.shm_rmid_forced", "value": "1"}]
        ),
    ),
    "shared processes": ("kernel", lambda pod: pod.update(shareProcessNamespace=True)),
    "block device": ("kernel", add_block_device),
    "host alias": (
        "names",
        lambda pod: pod.update(hostAliases=[{"ip": "8.8.8.8", "hostnames": ["hub"]}]),
    ),
    "own resolver": (
        "names",
        lambda pod: pod.update(
            dnsPolicy="None", dnsConfig={"nameservers": ["8.8.8.8"]}
        ),
    ),
    "resolver of the node": ("names", lambda pod: pod.update(dnsPolicy="Default")),
    "second container": (
        "container",
        lambda pod: pod["containers"].append({**container(pod), "name": "more"}),
    ),
    "init container": ("container", add_init_container("init", "finetune-trainer:1")),
    "init container of another image": (
        "container",
        add_init_container("verify", "finetune-trainer-mine:1"),
    ),
    "no seccomp": ("seccomp", lambda pod: pod["securityContext"].pop("seccompProfile")),
    "container without seccomp": (
        "seccomp",
        lambda pod: container(pod)["securityContext"].update(
            seccompProfile={"type": "Unconfined"}
        ),
    ),
}
HOSTILE_OBJECTS: dict[str, tuple[str, str, Change]] = {
    "job without label": (
        "train",
        "label",
        lambda manifest: manifest["metadata"].update(labels=OTHER),
    ),
    "deployment of another": (
        "deploy",
        "label",
        lambda manifest: manifest["metadata"]["labels"].update(
            {"app.kubernetes.io/managed-by": "Helm"}
        ),
    ),
    "service without label": (
        "service",
        "label",
        lambda manifest: manifest["metadata"].pop("labels"),
    ),
    "claim without label": (
        "claim",
        "label",
        lambda manifest: manifest["metadata"].pop("labels"),
    ),
    "job of another owner": (
        "train",
        "owner",
        lambda manifest: manifest["metadata"].update(ownerReferences=[CONFIG_MAP]),
    ),
    "job without owner": (
        "train",
        "owned",
        lambda manifest: manifest["metadata"].pop("ownerReferences"),
    ),
    "service without owner": (
        "service",
        "owned",
        lambda manifest: manifest["metadata"].pop("ownerReferences"),
    ),
    "kind of another group": (
        "train",
        "owner",
        lambda manifest: manifest["metadata"].update(
            ownerReferences=[{**PIPELINE, "apiVersion": "other.dev/v1"}]
        ),
    ),
    "service for the outside": (
        "service",
        "service",
        lambda manifest: manifest["spec"].update(type="LoadBalancer"),
    ),
    "service with a foreign ip": (
        "service",
        "service",
        lambda manifest: manifest["spec"].update(externalIPs=["8.8.8.8"]),
    ),
    "service of all pods": (
        "service",
        "selector",
        lambda manifest: manifest["spec"].update(selector={"app": "database"}),
    ),
    "name of all pods": (
        "headless",
        "selector",
        lambda manifest: manifest["spec"].update(selector={"app": "database"}),
    ),
    "address of a stage": (
        "headless",
        "selector",
        lambda manifest: manifest["spec"].pop("clusterIP"),
    ),
    "claim of a volume": (
        "claim",
        "content",
        lambda manifest: manifest["spec"].update(volumeName="of-another"),
    ),
    "claim with content": (
        "claim",
        "content",
        lambda manifest: manifest["spec"].update(
            dataSource={"kind": "PersistentVolumeClaim", "name": "secret-data"}
        ),
    ),
}
LEGITIMATE_PATCHES: dict[str, Object] = {
    "larger": {"spec": {"resources": {"requests": {"storage": "2Gi"}}}},
    "owned": {"metadata": {"ownerReferences": [PIPELINE]}},
    "annotated": {"metadata": {"annotations": {"finetune.dev/workspace-of": "demo"}}},
    "labelled": {"metadata": {"labels": {"finetune.dev/pipeline": "demo"}}},
}
HOSTILE_PATCHES: dict[str, tuple[str, Object]] = {
    "foreign owner": ("owner", {"metadata": {"ownerReferences": [CONFIG_MAP]}}),
    "second owner": (
        "owner",
        {"metadata": {"ownerReferences": [PIPELINE, CONFIG_MAP]}},
    ),
    "label of others": ("metadata", {"metadata": {"labels": {"team": "other"}}}),
    "label of others removed": (
        "metadata",
        {"metadata": {"labels": {"example.com/cost": None}}},
    ),
    "annotation of others": (
        "metadata",
        {"metadata": {"annotations": {"volume.kubernetes.io/selected-node": "n"}}},
    ),
    "annotation removed": (
        "metadata",
        {"metadata": {"annotations": {"example.com/backup": None}}},
    ),
    "no finalizer": ("deletion", {"metadata": {"finalizers": None}}),
    "volume attributes": ("spec", {"spec": {"volumeAttributesClassName": "fast"}}),
}
