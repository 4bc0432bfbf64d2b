"""The volumes that a user may add to a pod: those that a Job may have at the Pod Security level restricted.

Sources that hold a token of the cluster, or a folder of the node, are not among them.
"""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from finetune_operator.api.names import DNS_LABEL, DataKey, ObjectName
from finetune_operator.api.rules import Rule, WithRules
from finetune_operator.api.stages.environment import exactly_one
from finetune_trainer.contract import ContractModel

# No ".." in a path: it would leave the volume.
RELATIVE_PATH = r"^([^/.:]|[.][^/.:])([^/:]*)(/([^/.:]|[.][^/.:])[^/:]*)*$"
ABSOLUTE_PATH = r"^(/([^/.:]|[.][^/.:])[^/:]*)+$"
RelativePath = Annotated[str, StringConstraints(max_length=256, pattern=RELATIVE_PATH)]
# Kubernetes refuses a mode with other bits, such as setuid.
MAX_MODE = 0o777
Mode = Annotated[int, Field(ge=0, le=MAX_MODE)]

OWN_VOLUMES = "^(workspace|tmp|shm|model|claim-[0-9]+)$"
"""Names of the volumes that the operator adds."""
OWN_PATHS = "^/((workspace|claims|models|dev|proc|sys)(/.*)?|tmp)$"
"""Paths that the operator mounts, and paths of the container runtime."""


class KeyToPath(ContractModel):
    """A key of a Secret or ConfigMap as a file."""

    key: DataKey
    """Key in the object."""
    path: RelativePath
    """Path of the file, relative to mountPath."""
    mode: Mode | None = None
    """Permissions, such as 256 for 0400. Absent: the volume's."""


Items = Annotated[tuple[KeyToPath, ...], Field(max_length=32)]


class KeysAsFiles(ContractModel):
    """Keys of an object as files."""

    items: Items | None = None
    """The keys, with their paths. Absent: all keys."""
    optional: bool | None = None
    """Whether the pod starts without it. Absent: it does not."""


class ProjectedObject(KeysAsFiles):
    """Keys of a Secret or ConfigMap in a projected volume."""

    name: ObjectName
    """Name of the object."""


class ConfigMapVolume(ProjectedObject):
    """The keys of a ConfigMap as files."""

    default_mode: Mode | None = None
    """Permissions. Absent: 420, which is 0644."""


class SecretVolume(KeysAsFiles):
    """The keys of a Secret as files. The kubelet reads it; the operator cannot."""

    secret_name: ObjectName
    """Name of the Secret."""
    default_mode: Mode | None = None
    """Permissions. Absent: 420, which is 0644."""


class Projection(ContractModel):
    """A source of a projected volume."""

    config_map: ProjectedObject | None = None
    """A ConfigMap."""
    secret: ProjectedObject | None = None
    """A Secret."""


class ProjectedVolume(ContractModel):
    """Several Secrets and ConfigMaps in one folder."""

    sources: tuple[Projection, ...] = Field(min_length=1, max_length=8)
    """The Secrets and ConfigMaps."""
    default_mode: Mode | None = None
    """Permissions. Absent: 420, which is 0644."""


CsiAttributes = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=256)],
        Annotated[str, StringConstraints(max_length=1024)],
    ],
    Field(max_length=32),
]


class CsiSecret(ContractModel):
    """A Secret for the CSI driver."""

    name: ObjectName
    """Name of the Secret."""


class CsiVolume(ContractModel):
    """A volume that a CSI driver makes for the pod, such as the driver of a store of secrets."""

    driver: ObjectName
    """Name of the driver."""
    read_only: bool | None = None
    """Whether the volume is read-only. Absent: the driver decides."""
    fs_type: Annotated[str, StringConstraints(max_length=32)] | None = None
    """File system of the volume. Absent: the driver decides."""
    volume_attributes: CsiAttributes | None = None
    """Settings for the driver."""
    node_publish_secret_ref: CsiSecret | None = None
    """A Secret for the driver."""


class ClaimVolume(ContractModel):
    """A claim, which is mounted for reading. Data that a stage names by pvc:// needs no volume."""

    claim_name: ObjectName
    """Name of the claim."""
    read_only: Literal[True] = True
    """Always true."""


SOURCES = ("configMap", "secret", "projected", "csi", "persistentVolumeClaim")


class Volume(WithRules):
    """A volume of the pod. A local run has none."""

    rules: ClassVar[tuple[Rule, ...]] = (
        exactly_one("volumes", SOURCES),
        # A rule of each source would be a rule in a list of lists, which no policy can check.
        Rule(
            field="projected.sources",
            message="each source is a configMap or a secret, and not both",
            cel="!has(self.projected)"
            " || self.projected.sources.all(one, has(one.configMap) != has(one.secret))",
            is_valid=lambda data: all(
                len(source) == 1
                for source in data.get("projected", {}).get("sources", ())
            ),
        ),
        Rule(
            field="name",
            message="is a name of the operator's own volumes: choose another name",
            reason="FieldValueForbidden",
            cel=f"!self.name.matches('{OWN_VOLUMES}')",
            is_valid=lambda data: not re.search(OWN_VOLUMES, data["name"]),
        ),
    )

    name: Annotated[str, StringConstraints(max_length=63, pattern=DNS_LABEL)]
    """Name of the volume."""
    config_map: ConfigMapVolume | None = None
    """The keys of a ConfigMap as files."""
    secret: SecretVolume | None = None
    """The keys of a Secret as files."""
    projected: ProjectedVolume | None = None
    """Several Secrets and ConfigMaps in one folder."""
    csi: CsiVolume | None = None
    """A volume that a CSI driver makes for the pod."""
    persistent_volume_claim: ClaimVolume | None = None
    """A claim, for reading."""


class VolumeMount(WithRules):
    """A folder or file of a volume in the container, for reading."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="mountPath",
            message="is a folder of the operator or of the runtime: choose another folder, such as /etc/company",
            reason="FieldValueForbidden",
            cel=f"!self.mountPath.matches('{OWN_PATHS}')",
            is_valid=lambda data: not re.search(OWN_PATHS, data["mountPath"]),
        ),
    )

    name: Annotated[str, StringConstraints(max_length=63, pattern=DNS_LABEL)]
    """Name of the volume."""
    mount_path: Annotated[str, StringConstraints(max_length=256, pattern=ABSOLUTE_PATH)]
    """Folder in the container, or file with subPath. In the stage's container, and in those that start a server."""
    sub_path: RelativePath | None = None
    """Path in the volume. A later change of a Secret or ConfigMap does not reach it."""
