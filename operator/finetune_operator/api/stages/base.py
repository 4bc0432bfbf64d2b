"""What every stage has in common: how its container runs, and what it must be able to say of itself."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, WithJsonSchema
from typing_extensions import override

from finetune_operator.api.placement import Capacity, Toleration
from finetune_operator.api.rules import Rule, WithRules
from finetune_operator.api.status import GateStatus, StageStatus
from finetune_trainer.contract import AnyResult, ContractModel, DatasetSource, ModelSource, StageConfig
from finetune_trainer.contract.environment import GIT_SHA, METRICS_PORT

QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"


def _as_text(value: Any) -> Any:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if whole else value


MAX_DEPTH = 32
"""Levels of an affinity; one that a pod can have is ten deep."""


def _no_deeper(value: dict[str, Any]) -> dict[str, Any]:
    """Keep out what can be read but not written: no schema limits how deep a field of any content is."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for one in level for child in _children(one)]
    if level:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep: no pod has such an affinity")
    return value


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


Quantity = Annotated[
    str,
    BeforeValidator(_as_text),
    StringConstraints(max_length=32, pattern=QUANTITY),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": QUANTITY,
            "maxLength": 32,
            "x-kubernetes-int-or-string": True,
        }
    ),
]
"""A Kubernetes quantity; cpu: 2 may be written without quotes, as in a pod."""

ObjectName = Annotated[str, StringConstraints(max_length=253, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")]
Argument = Annotated[str, StringConstraints(max_length=4096)]
VariableName = Annotated[str, StringConstraints(max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
LabelKey = Annotated[str, StringConstraints(max_length=316, pattern=r"^[A-Za-z0-9]([A-Za-z0-9_./-]*[A-Za-z0-9])?$")]
LabelValue = Annotated[str, StringConstraints(max_length=63, pattern=r"^([A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?)?$")]


RESERVED = "FINETUNE_"
USER_SETTABLE = frozenset({METRICS_PORT, GIT_SHA})


class Gpu(ContractModel):
    """Accelerators for one pod."""

    resource: LabelKey = "nvidia.com/gpu"
    """The extended resource that the device plugin advertises; a MIG slice has a name of its own."""

    count: int = Field(default=1, ge=1, le=16)
    """How many."""


class Resources(ContractModel):
    """What the stage's pod asks for; memory and accelerators are limits as well."""

    cpu: Quantity | None = None
    """Processors: 2, or 500m for half a one."""

    memory: Quantity | None = None
    """Bytes: 16Gi."""

    gpu: Gpu | None = None
    """Accelerators."""


class Placement(ContractModel):
    """Where the stage's pod may run."""

    capacity: Capacity = "on-demand"
    """spot is cheaper and may be taken away at any time; on-demand stays."""

    node_selector: dict[LabelKey, LabelValue] = Field(default_factory=dict, max_length=32)
    """Labels that the node must have; absent: those of the pool the stage is made for, where the operator has one."""

    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=32)
    """Taints that the pod does not mind, besides those that capacity and accelerators need."""

    affinity: Annotated[
        dict[str, Any],
        AfterValidator(_no_deeper),
        Field(json_schema_extra={"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
    ] = Field(default_factory=dict)
    """A pod's affinity, as Kubernetes has it; the cluster says what is wrong with it when the pod is made."""


class Retries(ContractModel):
    """How often the stage is started again. An eviction is no failure."""

    failures: int = Field(default=3, ge=0, le=100)
    """Failed attempts that are allowed; one more ends the stage."""

    interruptions: int = Field(default=20, ge=0, le=1000)
    """Interrupted attempts that are allowed: evictions, lost nodes."""


@dataclass(frozen=True)
class ConfigContext:
    """What a stage is told when it writes its process's config."""

    pipeline: str
    """namespace/name."""
    seed: int
    model: ModelSource
    dataset: DatasetSource
    specs: Mapping[str, "StageSpec"]
    """Of all requested stages, by name."""
    identities: Mapping[str, str]
    """Of the requested stages before this one."""
    statuses: Mapping[str, StageStatus]
    """What is known of all stages before this one."""


@dataclass(frozen=True)
class Serving:
    """A model that is to be served from now on."""

    engine: str
    model: str
    """Its URI."""
    digest: str | None
    """Of what lies there; None: it has not been published yet."""
    replicas: int
    prompt: str
    """Asked once before anybody's requests are sent to it."""
    max_tokens: int


ARGS_NEED_COMMAND = Rule(
    field="args",
    message="are the arguments of a command, and there is none; the trainer takes no others",
    cel="!has(self.args) || size(self.args) == 0 || (has(self.command) && size(self.command) > 0)",
    is_valid=lambda data: not data.get("args") or bool(data.get("command")),
)
"""For stages that are a program that ends; a server's engine takes arguments."""


class StageSpec(WithRules):
    """How the stage's container runs."""

    name: ClassVar[str]
    """The word for it everywhere: spec key, Job suffix, trainer sub-command."""
    condition: ClassVar[str]
    """Past tense, for status.conditions."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Stages that must be over before this one starts."""
    pool: ClassVar[str]
    """The kind of node it is made for."""
    runs_server: ClassVar[bool] = False
    """Whether it leaves something running, where the cluster can keep it."""
    non_identity_fields: ClassVar[frozenset[str]] = frozenset()
    """Its own fields that change how it runs and never what it makes."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="env",
            message="names that begin with FINETUNE_ are the stage contract's own; of these only FINETUNE_METRICS_PORT"
            " and FINETUNE_GIT_SHA may be set",
            cel="!has(self.env) || self.env.all(name, !name.startsWith('FINETUNE_')"
            " || name in ['FINETUNE_METRICS_PORT', 'FINETUNE_GIT_SHA'])",
            is_valid=lambda data: all(
                name in USER_SETTABLE or not name.startswith(RESERVED) for name in data.get("env", {})
            ),
        ),
    )

    image: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    """A container image in place of the trainer's. On a laptop there are no containers: the process runs as it is."""

    command: tuple[Argument, ...] = Field(default=(), max_length=64)
    """A program in place of the trainer. It keeps the stage contract: environment, folders, exit codes, result."""

    args: tuple[Argument, ...] = Field(default=(), max_length=256)
    """Arguments of that program. Of deploy without a command: on a cluster added to the engine's own."""

    resources: Resources = Resources()
    """What the stage's pod asks for."""

    placement: Placement = Placement()
    """Where the stage's pod may run."""

    env: dict[VariableName, Argument] = Field(default_factory=dict, max_length=128)
    """Environment variables for the process."""

    secret_refs: tuple[ObjectName, ...] = Field(default=(), max_length=16)
    """Secrets of the namespace whose keys become environment variables; on a laptop the process has your own."""

    service_account_name: ObjectName | None = None
    """The pod's identity towards a cloud; its token for the cluster is not mounted."""

    priority_class_name: ObjectName | None = None
    """Who waits for whom, and who is taken away for whom."""

    timeout_seconds: int | None = Field(default=None, ge=1, le=31_536_000)
    """How long the stage's attempts may run in all; time spent waiting does not count."""

    retries: Retries = Retries()
    """How often the stage is started again."""

    @abstractmethod
    def config(self, context: ConfigContext) -> StageConfig:
        """Write what the stage's process is told, with an empty identity."""

    def serving(self, config: StageConfig) -> Serving | None:  # noqa: ARG002  only a stage that serves has one
        """Say what goes on running when the stage is done, where the cluster can keep it; else None."""
        return None

    def source_uris(self) -> tuple[str, ...]:
        """Give the URIs of what it reads besides the model, the data set and other stages' work."""
        return ()

    def skip_reason(self, gate: GateStatus | None) -> str | None:  # noqa: ARG002  stages behind a gate look at it
        """Say why the stage is not run although it was asked for, or None."""
        return None

    def evaluate_gate(self, result: AnyResult) -> GateStatus | None:  # noqa: ARG002  only a stage that measures has one
        """Compare a result with the stage's own gate, or None where it has none."""
        return None


class GatedSpec(StageSpec):
    """A stage that may wait for the gate, and writes to the world outside, so that it is never put on spot nodes."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="placement.capacity",
            message="must be on-demand: it writes to the outside, and losing its node half-way cannot be undone",
            cel="!has(self.placement) || !has(self.placement.capacity) || self.placement.capacity != 'spot'",
            is_valid=lambda data: data.get("placement", {}).get("capacity") != "spot",
        ),
    )

    when: Literal["Always", "GatePassed"] = "Always"
    """GatePassed: only if the score is above evaluate.gate.threshold."""

    @override
    def skip_reason(self, gate: GateStatus | None) -> str | None:
        closed = gate is not None and gate.measured and not gate.passed
        return gate.message if gate and closed and self.when == "GatePassed" else None
