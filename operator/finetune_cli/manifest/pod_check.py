"""Checks what an API server refuses in a pod, and only there: in the Job of an attempt, long after `kubectl apply`."""

import re
from collections.abc import Iterator

from finetune_cli.manifest.fields import Location, pods
from finetune_operator.api.quantities import bytes_or_units
from finetune_operator.api.spec import PipelineSpec
from finetune_operator.api.stages.pod import PodDefaults, Resources, unmet_requests

Finding = tuple[Location, str]
"""Location below spec, and message."""
RESOURCE = re.compile(r"cpu|memory|ephemeral-storage|hugepages-(\d+[KMGT]i)")
"""Names of resources without a domain; an API server refuses a pod with any other."""
DEVICES = "devices have a domain: for a GPU of NVIDIA write nvidia.com/gpu"
OTHER_RESOURCES = {
    "storage": "for files in the container write ephemeral-storage, for the workspace spec.workspace.size",
    "disk": "for files in the container write ephemeral-storage, for the workspace spec.workspace.size",
    "cpus": "write cpu",
    "mem": "write memory",
    "ram": "write memory",
}
"""Names of resources elsewhere -> the fix."""
QUOTA_PREFIX = "requests."
"""Begins names in a ResourceQuota, and in no pod."""
# Kubernetes refuses huge pages in a container that requests neither cpu nor memory.
PAGES = "hugepages-"
REFUSED_ANNOTATIONS = (
    "container.apparmor.security.beta.kubernetes.io/",
    "container.seccomp.security.alpha.kubernetes.io/",
    "seccomp.security.alpha.kubernetes.io/",
    "scheduler.alpha.kubernetes.io/tolerations",
    "kubernetes.io/config.",
)
"""Beginnings of annotations of old versions; the pods here have the fields in their place."""
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
# Kubernetes reads the cost of a deletion without a plus sign and without leading zeros.
INTEGER = re.compile(r"0|-?[1-9][0-9]{0,9}")


def errors(spec: PipelineSpec) -> Iterator[Finding]:
    """Yield the values of pods that an API server refuses."""
    for path, pod in pods(spec).items():
        for location, message in _of_pod(pod):
            yield (*path, *location), message
    yield from _with_defaults(spec)


def warnings(spec: PipelineSpec) -> Iterator[Finding]:
    """Yield the volumes without a mount. The mount of a default volume may be in any stage."""
    settings = pods(spec)
    for path, pod in settings.items():
        users = [pod, settings.get(("podDefaults",), pod)]
        if path == ("podDefaults",):
            users = [*settings.values()]
        mounted = {mount.name for user in users for mount in user.volume_mounts}
        for number, volume in enumerate(pod.volumes):
            if volume.name not in mounted:
                fix = "add it to volumeMounts, or remove it"
                location = (*path, "volumes", number, "name")
                yield (
                    location,
                    f"no container has this volume, which has no mount; {fix}",
                )


def _of_pod(pod: PodDefaults) -> Iterator[Finding]:
    resources = pod.resources
    amounts = {"requests": resources.requests, "limits": resources.limits}
    for field, quantities in amounts.items():
        for name, quantity in quantities.items():
            problem = _problem(name, quantity)
            if problem:
                yield ("resources", field, name), problem
    for key, text in pod.annotations.items():
        if key.startswith(REFUSED_ANNOTATIONS):
            yield ("annotations", key), "an API server refuses it in a pod: remove it"
        elif key == DELETION_COST and not INTEGER.fullmatch(text):
            yield ("annotations", key), f'must be an integer in quotes (got "{text}")'


def _problem(name: str, quantity: str) -> str:
    """Return what is wrong with a resource; empty if nothing is."""
    if name.startswith(QUOTA_PREFIX):
        return f"names a quota, and no resource of a pod: write {name.removeprefix(QUOTA_PREFIX)}"
    if "/" in name:
        return ""
    known = RESOURCE.fullmatch(name)
    if known is None:
        fix = OTHER_RESOURCES.get(name, DEVICES)
        return f"{name} is no resource of Kubernetes; {fix}"
    page = known[1]
    if page and bytes_or_units(quantity) % bytes_or_units(page):
        return f"must be a multiple of {page} (got {quantity})"
    return ""


def _with_defaults(spec: PipelineSpec) -> Iterator[Finding]:
    """Yield what is wrong with the resources of a stage only together with its defaults."""
    for name, stage in spec.stages().items():
        own: Resources = getattr(spec, name).pod.resources
        both = stage.pod.resources
        data = {"requests": both.requests, "limits": both.limits}
        for (field, resource), problem in unmet_requests(data):
            # Not there: the limit stands in the stage, and its request is a default.
            here = resource in own.requests
            own_field = field if here else "limits"
            if here and resource in own.limits:
                continue
            if not here and resource not in own.limits:
                continue
            note = "with podDefaults, the request"
            yield (name, "pod", "resources", own_field, resource), f"{note} {problem}"
        amounts = {**both.requests, **both.limits}
        has_pages = any(resource.startswith(PAGES) for resource in amounts)
        if has_pages and amounts.keys().isdisjoint({"cpu", "memory"}):
            fix = "add limits: {memory: …}"
            message = f"huge pages need cpu or memory beside them: {fix}"
            yield (name, "pod", "resources"), message
