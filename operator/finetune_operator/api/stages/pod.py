"""The pod of a stage, in core/v1's own shapes: only the fields that the operator passes on.

Volumes of other kinds than in `volumes.py`, security contexts and containers besides the stage's are not among them, so
that creating a pipeline grants no more than creating a Job in a namespace with the Pod Security level restricted.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StringConstraints,
    WithJsonSchema,
)

from finetune_operator.api.names import (
    AnnotationKey,
    AnnotationValue,
    Image,
    LabelKey,
    LabelValue,
    ObjectName,
)
from finetune_operator.api.placement import Toleration
from finetune_operator.api.quantities import bytes_or_units
from finetune_operator.api.rules import Detail, Rule, WithRules
from finetune_operator.api.stages.affinity_size import check_depth_and_size
from finetune_operator.api.stages.environment import (
    RESERVED_NAMES,
    Argument,
    EnvFrom,
    EnvVar,
    text_is_bounded,
)
from finetune_operator.api.stages.topology_spread import TopologySpreadConstraint
from finetune_operator.api.stages.volumes import Volume, VolumeMount
from finetune_trainer.contract import ContractModel, ListMap

QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"
# `memory: 16` would be 16 bytes. A text in CEL has no escape for a dot, hence [.].
BYTES = (
    r"^([1-9][0-9]{6,}"
    r"|[0-9]*[1-9][0-9]*([.][0-9]+)?(M|G|T|P|E|Mi|Gi|Ti|Pi|Ei)"
    r"|0[.][1-9][0-9]*(G|T|P|E|Gi|Ti|Pi|Ei))$"
)
"""Amounts of memory and storage of at least a megabyte."""
# A device plugin chooses the part after the slash, so only the vendors are listed.
VENDORS = "^(nvidia[.]com|amd[.]com|gpu[.]intel[.]com|habana[.]ai)/"
# Of HAMi, and of Intel's GPU-aware scheduling.
SHARES = "/(gpumem|gpumem-percentage|gpucores|priority|memory[.]max|millicores|tiles)$"
"""Resources of a vendor that measure the pod's part of a device: its memory, or its time."""
IS_ACCELERATOR = f"name.matches('{VENDORS}') && !name.matches('{SHARES}')"
"""Whether the resource `name` counts accelerators, in CEL."""


def is_accelerator(name: str) -> bool:
    """Return whether a resource counts accelerators: whole devices, and slices such as nvidia.com/mig-3g.40gb."""
    return bool(re.search(VENDORS, name)) and not re.search(SHARES, name)


def _integer_to_text(value: Any) -> Any:
    # In Python, True is an int; in a manifest, it is no quantity.
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_integer else value


def _int_or_string(pattern: str) -> WithJsonSchema:
    return WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": pattern,
            "maxLength": 32,
            "x-kubernetes-int-or-string": True,
        }
    )


Quantity = Annotated[
    str,
    BeforeValidator(_integer_to_text),
    StringConstraints(max_length=32, pattern=QUANTITY),
    _int_or_string(QUANTITY),
]
"""A Kubernetes quantity. As in a pod, an integer needs no quotes: cpu: 2."""
StorageSize = Annotated[
    str,
    BeforeValidator(_integer_to_text),
    StringConstraints(max_length=32, pattern=BYTES),
    _int_or_string(BYTES),
]
"""A quantity of bytes, at least a megabyte."""
ResourceList = Annotated[dict[LabelKey, Quantity], Field(max_length=16)]


def _has_bytes(field: str, resource: str) -> Rule:
    """Return the rule that an amount of memory or storage is not a number of bytes by mistake."""
    amount = f"self.{field}['{resource}']"
    return Rule(
        field=f"{field}.{resource}",
        message="is less than a megabyte; write 16Gi for gibibytes or 16G for gigabytes",
        cel=f"!has(self.{field}) || !('{resource}' in self.{field}) || string({amount}).matches('{BYTES}')",
        is_valid=lambda data: bool(
            re.match(BYTES, str(data.get(field, {}).get(resource, "1Gi")))
        ),
    )


def _has_whole_devices(field: str) -> Rule:
    """Return the rule that devices are not divided; Kubernetes takes a fraction for none of them."""
    is_whole = f"!name.contains('/') || string(self.{field}[name]).matches('^[0-9]+$')"
    return Rule(
        field=field,
        message="devices such as nvidia.com/gpu are counted in integers",
        cel=f"!has(self.{field}) || self.{field}.all(name, {is_whole})",
        is_valid=lambda data: all(
            re.fullmatch("[0-9]+", str(count))
            for name, count in data.get(field, {}).items()
            if "/" in name
        ),
    )


def needs_equal_limit(resource: str) -> bool:
    """Return whether Kubernetes takes a request of this resource only together with an equal limit."""
    return "/" in resource or resource.startswith("hugepages-")


def unmet_requests(data: Mapping[str, Any]) -> Iterator[Detail]:
    """Yield the requests that no pod may have beside these limits, with the fix."""
    limits = data.get("limits", {})
    for resource, request in data.get("requests", {}).items():
        limit = limits.get(resource)
        problem = ""
        if needs_equal_limit(resource):
            if limit is None:
                problem = f"needs an equal limit: write limits: {{{resource}: {request}}} instead"
            elif bytes_or_units(request) != bytes_or_units(limit):
                problem = f"is not the limit of {limit}: remove it, as a limit is also the request"
        elif limit is not None and bytes_or_units(request) > bytes_or_units(limit):
            problem = f"is above the limit of {limit}: write at most {limit}, or raise the limit"
        if problem:
            yield ("requests", resource), f"{problem} (got {request})"


_LIMIT = "self.limits[name]"
_REQUEST = "self.requests[name]"
_HAS_LIMIT = "(has(self.limits) && name in self.limits)"
REQUESTS_WITHIN_LIMITS = Rule(
    field="requests",
    message="must not be above limits, and devices such as nvidia.com/gpu need an equal limit",
    # A resource that needs an equal limit has an integer: its text is equal, too.
    cel="!has(self.requests) || self.requests.all(name, (name.contains('/') || name.startsWith('hugepages-'))"
    f" ? {_HAS_LIMIT} && string({_REQUEST}) == string({_LIMIT})"
    f" : !{_HAS_LIMIT} || quantity(string({_REQUEST})).compareTo(quantity(string({_LIMIT}))) <= 0)",
    is_valid=lambda data: not any(unmet_requests(data)),
    details=unmet_requests,
)


class Resources(WithRules):
    """Compute resources of the stage's container, as in a pod."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *(
            _has_bytes(field, resource)
            for field in ("requests", "limits")
            for resource in ("memory", "ephemeral-storage")
        ),
        _has_whole_devices("requests"),
        _has_whole_devices("limits"),
        REQUESTS_WITHIN_LIMITS,
    )

    requests: ResourceList = Field(default_factory=dict)
    """Amounts that the scheduler reserves, such as memory: 16Gi. A resource with only a limit requests the limit."""

    limits: ResourceList = Field(default_factory=dict)
    """What the container may use at most, for example memory: 16Gi, nvidia.com/gpu: 1."""

    @property
    def accelerators(self) -> int:
        """The number of accelerators among the limits."""
        return sum(int(self.limits[name]) for name in self.accelerator_names)

    @property
    def accelerator_names(self) -> tuple[str, ...]:
        """The names of the accelerators of which the limits have at least one."""
        return tuple(
            name
            for name, count in self.limits.items()
            if is_accelerator(name) and count.isdigit() and int(count) > 0
        )


class ImagePullSecret(ContractModel):
    """A Secret with credentials of an image registry."""

    name: ObjectName
    """Name of the Secret."""


def _reserved_keys(field: str, reserved: str, message: str) -> Rule:
    return Rule(
        field=field,
        message=message,
        reason="FieldValueForbidden",
        cel=f"!has(self.{field}) || !self.{field}.exists(key, key.matches('{reserved}'))",
        is_valid=lambda data: (
            not any(re.match(reserved, key) for key in data.get(field, ()))
        ),
    )


class PodDefaults(WithRules):
    """Defaults of the pods of all stages. A stage's own pod adds to them, and replaces defaults with the same key."""

    rules: ClassVar[tuple[Rule, ...]] = (
        RESERVED_NAMES,
        _reserved_keys(
            "labels",
            "^(finetune[.]dev/|batch[.]kubernetes[.]io/|controller-uid$|job-name$)",
            "keys of the operator (finetune.dev/) and of Jobs (batch.kubernetes.io/, controller-uid, job-name)"
            " are reserved: choose another prefix",
        ),
        _reserved_keys(
            "annotations",
            "^finetune[.]dev/",
            "keys with the prefix finetune.dev/ are the operator's own: choose another prefix",
        ),
        text_is_bounded(),
    )

    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When the kubelet pulls the image. Absent: Kubernetes' default for the image's tag."""

    image_pull_secrets: Annotated[tuple[ImagePullSecret, ...], ListMap("name")] = Field(
        default=(), max_length=8
    )
    """Secrets with credentials of the image's registry."""

    resources: Resources = Resources()
    """Compute resources of the container."""

    env: Annotated[tuple[EnvVar, ...], ListMap("name")] = Field(
        default=(), max_length=128
    )
    """Environment variables."""

    env_from: tuple[EnvFrom, ...] = Field(default=(), max_length=16)
    """Secrets and ConfigMaps whose keys become environment variables."""

    volumes: Annotated[tuple[Volume, ...], ListMap("name")] = Field(
        default=(), max_length=16
    )
    """ConfigMaps, Secrets, CSI volumes and claims for reading, as in a pod. The stage's own volumes are added."""

    volume_mounts: Annotated[tuple[VolumeMount, ...], ListMap("mountPath")] = Field(
        default=(), max_length=16
    )
    """Where the container has the volumes, for reading."""

    termination_grace_period_seconds: int | None = Field(default=None, ge=6, le=86_400)
    """Time from SIGTERM to SIGKILL, to save a checkpoint. Absent: the operator's, which is 30 seconds by default."""

    shared_memory: StorageSize | None = None
    """Limit of /dev/shm, such as 8Gi, for data loaders and NCCL. What is written there counts against
    resources.limits.memory. Absent: the pod's memory for a pod with a device or a runtimeClassName and for a training
    of several processes, else 64 MiB."""

    node_selector: dict[LabelKey, LabelValue] = Field(
        default_factory=dict, max_length=32
    )
    """Labels that the node must have. Absent: the labels of the stage's pool, if the operator defines it."""

    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=32)
    """Additional tolerations. The operator adds the tolerations for the pool, the capacity and accelerators."""

    affinity: Annotated[
        dict[str, Any],
        AfterValidator(check_depth_and_size),
        Field(
            json_schema_extra={
                "type": "object",
                "x-kubernetes-preserve-unknown-fields": True,
            }
        ),
    ] = Field(default_factory=dict)
    """Affinity of the pod, as in kubectl explain pod.spec.affinity. The API server validates it when the Job is
    created."""

    topology_spread_constraints: Annotated[
        tuple[TopologySpreadConstraint, ...],
        ListMap("topologyKey", "whenUnsatisfiable"),
    ] = Field(default=(), max_length=8)
    """How the pods of an attempt spread over zones or nodes: replicas of a server, or pods of a training."""

    labels: dict[LabelKey, LabelValue] = Field(default_factory=dict, max_length=32)
    """Labels of the Job and of its pods, for example kueue.x-k8s.io/queue-name."""

    annotations: dict[AnnotationKey, AnnotationValue] = Field(
        default_factory=dict, max_length=16
    )
    """Annotations of the Job and of its pods."""

    service_account_name: ObjectName | None = None
    """ServiceAccount of the pod, such as for access to a cloud. The account's token for the cluster is not mounted."""

    priority_class_name: ObjectName | None = None
    """PriorityClass of the pod, which orders scheduling and preemption."""

    scheduler_name: ObjectName | None = None
    """Scheduler that places the pod. Absent: the cluster's default."""

    runtime_class_name: ObjectName | None = None
    """RuntimeClass of the pod. Absent: the cluster's default."""

    def over(self, defaults: "PodDefaults") -> Self:
        """Return this pod with the defaults below it."""
        # Not the fields of Pod: image, command and args have no defaults.
        mine = {name: getattr(self, name) for name in PodDefaults.model_fields}
        theirs = {name: getattr(defaults, name) for name in PodDefaults.model_fields}
        return self.model_copy(
            update={name: _over(mine[name], theirs[name]) for name in mine}
        )


class Pod(PodDefaults):
    """The stage's pod, in the shapes of core/v1. A local run uses its env, command and args."""

    rules: ClassVar[tuple[Rule, ...]] = (text_is_bounded("command", "args"),)

    image: Image | None = None
    """Container image that replaces the trainer's. Absent: the trainer's image with CUDA for a pod with a
    device in resources.limits or with a runtimeClassName, and the image without CUDA for every other pod."""

    command: tuple[Argument, ...] = Field(default=(), max_length=64)
    """Program that replaces the trainer. It must keep the stage contract: environment, folders, exit codes, result."""

    args: tuple[Argument, ...] = Field(default=(), max_length=256)
    """Arguments of command. For deploy without command: additional arguments of the engine, on a cluster only."""

    @property
    def may_have_devices(self) -> bool:
        """Whether the pod asks for an extended resource, or has a runtime that may add a device."""
        asked = any(
            "/" in name and amount != "0"
            for name, amount in self.resources.limits.items()
        )
        return asked or self.runtime_class_name is not None

    def literal_env(self) -> dict[str, str]:
        """Return the variables that have a value."""
        return {
            variable.name: variable.value or ""
            for variable in self.env
            if variable.value_from is None
        }


def _over(mine: Any, theirs: Any) -> Any:
    """Return a value over its default: mappings and lists are joined, and everything else is replaced."""
    match mine:
        case Resources():
            # Not validated again: both together may have more entries than each may. The user could not fix that.
            requests = theirs.requests | mine.requests
            limits = theirs.limits | mine.limits
            return mine.model_copy(update={"requests": requests, "limits": limits})
        case dict():
            return theirs | mine
        case tuple():
            # Entries without a key, such as tolerations, replace nothing: they are only added.
            keys = {_key_of(entry) for entry in mine} - {None}
            kept = (entry for entry in theirs if _key_of(entry) not in keys)
            return (*kept, *mine)
        case _:
            return theirs if mine is None else mine


def _key_of(entry: Any) -> Any:
    """Return what tells entries of a list apart, such as a name; None for entries that are only added."""
    match entry:
        case VolumeMount():
            return entry.mount_path
        case TopologySpreadConstraint():
            return entry.topology_key, entry.when_unsatisfiable
        case _:
            return getattr(entry, "name", None)
