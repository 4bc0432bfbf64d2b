"""Fields that the operator never builds, each with the rule that refuses it; and fields that pipelines choose."""

from support.operator.admission_cases import Change, Object, add_volume, container

METADATA: Object = {
    "httpGet": {"host": "169.254.169.254", "port": 80, "path": "/latest/meta-data"}
}
"""A request that the kubelet sends for the pod."""
VICTIM = {"finetune.dev/server": "victim-deploy-a1"}


def sets(**fields: object) -> Change:
    """Return a change of the pod's fields."""
    return lambda pod: pod.update(fields)


def sets_of_container(**fields: object) -> Change:
    return lambda pod: container(pod).update(fields)


def sets_of_security(**fields: object) -> Change:
    return lambda pod: pod["securityContext"].update(fields)


FIELDS_OF_PODS: dict[str, tuple[str, Change]] = {
    "readiness gates": ("field", sets(readinessGates=[{"conditionType": "x/y"}])),
    "scheduling gates": ("field", sets(schedulingGates=[{"name": "x/y"}])),
    "host users": ("field", sets(hostUsers=True)),
    "host name": ("field", sets(hostname="db")),
    "host name as FQDN": ("field", sets(setHostnameAsFQDN=True)),
    "overhead": ("field", sets(overhead={"cpu": "9"})),
    "preemption": ("field", sets(preemptionPolicy="Never")),
    "operating system": ("field", sets(os={"name": "linux"})),
    "policy of groups": ("field", sets_of_security(supplementalGroupsPolicy="Merge")),
    "terminal": ("field", sets_of_container(stdin=True, tty=True)),
    "arguments": ("field", sets_of_container(args=["x"])),
    "working folder": ("field", sets_of_container(workingDir="/x")),
    "resize policy": (
        "field",
        sets_of_container(
            resizePolicy=[{"resourceName": "cpu", "restartPolicy": "NotRequired"}]
        ),
    ),
    "writable root": (
        "files",
        lambda pod: container(pod)["securityContext"].pop("readOnlyRootFilesystem"),
    ),
    "another user": ("files", sets_of_security(runAsUser=999)),
    "another group": ("files", sets_of_security(runAsGroup=999)),
    "another group of volumes": ("files", sets_of_security(fsGroup=999)),
    "another user of a container": (
        "files",
        lambda pod: container(pod)["securityContext"].update(runAsUser=999),
    ),
    "priority of the system": (
        "priority",
        sets(priorityClassName="system-node-critical"),
    ),
    "endless end": ("priority", sets(terminationGracePeriodSeconds=10**8)),
}
"""Fields of the pods of Jobs and of Deployments."""


def changes_template(**fields: object) -> Change:
    return lambda manifest: manifest["spec"]["template"]["metadata"].update(fields)


def labels_pods(**labels: str) -> Change:
    return lambda manifest: manifest["spec"]["template"]["metadata"]["labels"].update(
        labels
    )


def changes_stage(**fields: object) -> Change:
    return lambda manifest: container(manifest["spec"]["template"]["spec"]).update(
        fields
    )


def changes_verify(**fields: object) -> Change:
    def change(manifest: Object) -> None:
        manifest["spec"]["template"]["spec"]["initContainers"][0].update(fields)

    return change


def adds_verify(manifest: Object) -> None:
    """Add the init container of a server, with the trainer's image, to the pod of a Job."""
    pod = manifest["spec"]["template"]["spec"]
    context = container(pod)["securityContext"]
    image = "finetune-trainer:1"
    pod["initContainers"] = [
        {"name": "verify", "image": image, "securityContext": context}
    ]


def annotates(key: str) -> Change:
    return lambda manifest: (
        manifest["metadata"].setdefault("annotations", {}).update({key: "x"})
    )


def finalizes(manifest: Object) -> None:
    manifest["metadata"]["finalizers"] = ["a/b"]


def changes(**fields: object) -> Change:
    return lambda manifest: manifest["spec"].update(fields)


FIELDS_OF_OBJECTS: dict[str, tuple[str, str, Change]] = {
    "server label of another on a Job": ("prepare", "server", labels_pods(**VICTIM)),
    "selector of another server": (
        "deploy",
        "server",
        lambda manifest: (
            manifest["spec"].update(selector={"matchLabels": VICTIM}),
            manifest["spec"]["template"]["metadata"]["labels"].update(VICTIM),
        ),
    ),
    "finalizer of pods": ("prepare", "field", changes_template(finalizers=["a/b"])),
    "hook of a Job": (
        "prepare",
        "field",
        changes_stage(lifecycle={"preStop": METADATA}),
    ),
    "probe of a Job": ("prepare", "field", changes_stage(livenessProbe=METADATA)),
    "hook after the start": (
        "deploy",
        "probe",
        changes_stage(lifecycle={"postStart": METADATA}),
    ),
    "hook before the end": (
        "deploy",
        "probe",
        changes_stage(lifecycle={"preStop": METADATA}),
    ),
    "probe of another host": (
        "deploy",
        "probe",
        changes_stage(readinessProbe=METADATA),
    ),
    "probe by a program": (
        "deploy",
        "probe",
        changes_stage(livenessProbe={"exec": {"command": ["id"]}}),
    ),
    "probe by a connection": (
        "deploy",
        "probe",
        changes_stage(startupProbe={"tcpSocket": {"host": "10.0.0.1", "port": 22}}),
    ),
    "verify with another program": (
        "deploy",
        "verify",
        changes_verify(command=["sh", "-c", "id"]),
    ),
    "verify as a sidecar": ("deploy", "field", changes_verify(restartPolicy="Always")),
    "verify in a Job": ("prepare", "verify", adds_verify),
    "no verify": (
        "deploy",
        "verify",
        lambda manifest: manifest["spec"]["template"]["spec"].pop("initContainers"),
    ),
    "manager of a Job": ("prepare", "field", changes(managedBy="a/b")),
    "end of a Job": ("prepare", "field", changes(ttlSecondsAfterFinished=0)),
    "deadline of a Job": ("prepare", "field", changes(activeDeadlineSeconds=9)),
    "thousand pods": ("prepare", "number", changes(parallelism=1000, completions=1000)),
    "thousand replicas": ("deploy", "number", changes(replicas=1000)),
    "paused Deployment": ("deploy", "field", changes(paused=True)),
    "finalizer of a Job": ("prepare", "finalizer", finalizes),
    "finalizer of a Deployment": ("deploy", "finalizer", finalizes),
    "finalizer of a Service": ("service", "finalizer", finalizes),
    "finalizer of a claim": ("claim", "finalizer", finalizes),
    "name in the DNS": (
        "service",
        "annotation",
        annotates("external-dns.alpha.kubernetes.io/hostname"),
    ),
    "node of a claim": (
        "claim",
        "metadata",
        annotates("volume.kubernetes.io/selected-node"),
    ),
    "second selector": (
        "service",
        "selector",
        changes(selector={**VICTIM, "app": "payments"}),
    ),
    "port of another": (
        "service",
        "field",
        changes(ports=[{"port": 443, "targetPort": 1}]),
    ),
    "traffic of the zone": (
        "service",
        "field",
        changes(trafficDistribution="PreferClose"),
    ),
}


def add_secret(manifest: Object) -> None:
    add_volume(secret={"secretName": "root"})(manifest["spec"]["template"]["spec"])


STAYS_POSSIBLE: dict[str, tuple[str, Change]] = {
    "users choose labels of pods": ("prepare", labels_pods(app="payments")),
    "users choose Secrets": ("prepare", add_secret),
    "users choose programs": ("prepare", changes_stage(command=["id"])),
    "users choose nodes": (
        "prepare",
        lambda manifest: manifest["spec"]["template"]["spec"].update(
            tolerations=[{"operator": "Exists"}]
        ),
    ),
    "users choose the service account": (
        "deploy",
        lambda manifest: manifest["spec"]["template"]["spec"].update(
            serviceAccountName="team"
        ),
    ),
    "users choose the size": (
        "claim",
        lambda manifest: manifest["spec"]["resources"]["requests"].update(
            storage="100Ti"
        ),
    ),
    "a Service names its server": ("service", changes(selector=VICTIM)),
}
"""Why a leaked token may create it -> the object, and its change. SECURITY.md names each."""
