"""The base of all stages: how a stage's container runs, and the interface that the core uses."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, WithJsonSchema
from typing_extensions import override

from finetune_operator.api.placement import Capacity, Toleration
from finetune_operator.api.rules import Rule, WithRules
from finetune_operator.api.status import GateStatus, StageStatus
from finetune_trainer.contract import AnyResult, ContractModel, DatasetSource, ModelSource, StageConfig
from finetune_trainer.contract.environment import GIT_SHA, METRICS_PORT

QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"


R = TypeVar("R", bound=ContractModel)


def _integer_to_text(value: Any) -> Any:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_integer else value


MAX_DEPTH = 32
"""Nesting levels allowed in an affinity. A valid affinity of a pod has at most ten."""


def _check_depth(value: dict[str, Any]) -> dict[str, Any]:
    """Raise ValueError if the value is nested too deeply.

    The schema of a field with arbitrary content cannot limit its depth. Without this limit an API server could store an
    object that the operator reads but cannot serialise again.
    """
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in _children(node)]
    if level:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep: a valid affinity of a pod is not")
    return value


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


Quantity = Annotated[
    str,
    BeforeValidator(_integer_to_text),
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
"""A Kubernetes quantity. As in a pod, an integer needs no quotes: cpu: 2."""

ObjectName = Annotated[str, StringConstraints(max_length=253, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")]
Argument = Annotated[str, StringConstraints(max_length=4096)]
VariableName = Annotated[str, StringConstraints(max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
LabelKey = Annotated[str, StringConstraints(max_length=316, pattern=r"^[A-Za-z0-9]([A-Za-z0-9_./-]*[A-Za-z0-9])?$")]
LabelValue = Annotated[str, StringConstraints(max_length=63, pattern=r"^([A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?)?$")]


RESERVED_PREFIX = "FINETUNE_"
USER_SETTABLE = frozenset({METRICS_PORT, GIT_SHA})


class Gpu(ContractModel):
    """Accelerators for one pod."""

    resource: LabelKey = "nvidia.com/gpu"
    """Extended resource that the device plugin advertises. A MIG slice has its own name."""

    count: int = Field(default=1, ge=1, le=16)
    """Number of accelerators. The trainer uses one; the engine of deploy and a command of your own may use more."""


class Resources(ContractModel):
    """Resource requests of the stage's pod. Memory and accelerators are limits too."""

    cpu: Quantity | None = None
    """CPU request, for example 2, or 500m for half a CPU."""

    memory: Quantity | None = None
    """Memory request and limit, for example 16Gi."""

    gpu: Gpu | None = None
    """Accelerators. Absent: none."""


class Placement(ContractModel):
    """Nodes on which the stage's pod may run."""

    capacity: Capacity = "on-demand"
    """Type of capacity. spot nodes are cheaper and may be reclaimed at any time; on-demand nodes are not."""

    node_selector: dict[LabelKey, LabelValue] = Field(default_factory=dict, max_length=32)
    """Labels that the node must have. Absent: the labels of the stage's pool, if the operator defines it."""

    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=32)
    """Additional tolerations. Those for the pool, the capacity and accelerators are added automatically."""

    affinity: Annotated[
        dict[str, Any],
        AfterValidator(_check_depth),
        Field(json_schema_extra={"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
    ] = Field(default_factory=dict)
    """Affinity of the pod, as in a pod spec. The API server validates it when the Job is created."""


class Retries(ContractModel):
    """Retry budgets of the stage. An interruption, such as an eviction, does not count as a failure."""

    failures: int = Field(default=3, ge=0, le=100)
    """Number of failed attempts that are retried. One more fails the stage."""

    interruptions: int = Field(default=20, ge=0, le=1000)
    """Number of interrupted attempts (evictions, lost nodes) that are retried. One more fails the stage."""


@dataclass(frozen=True)
class ConfigContext:
    """The inputs from which a stage builds the config of its process."""

    pipeline: str
    """Key of the pipeline: namespace/name."""
    seed: int
    model: ModelSource
    dataset: DatasetSource
    specs: Mapping[str, "StageSpec"]
    """Specs of all requested stages, by name."""
    identities: Mapping[str, str]
    """Identities of the requested stages before this one, by name."""
    statuses: Mapping[str, StageStatus]
    """Statuses of all stages before this one, by name."""


@dataclass(frozen=True)
class Serving:
    """A model to be served after the stage is done."""

    engine: str
    model: str
    """URI of the model."""
    digest: str | None
    """Digest of the published model. None: not published yet."""
    replicas: int
    prompt: str
    """Sent once before the server receives traffic."""
    max_tokens: int


ARGS_NEED_COMMAND = Rule(
    field="args",
    message="has no effect without command, because the trainer takes no arguments: add command, or remove args",
    cel="!has(self.args) || size(self.args) == 0 || (has(self.command) && size(self.command) > 0)",
    is_valid=lambda data: not data.get("args") or bool(data.get("command")),
)
"""Applies to stages that run to completion. A server passes `args` to its engine instead."""

ONE_GPU = Rule(
    field="resources.gpu.count",
    message="must be 1 without command, because the trainer uses one accelerator: set 1, or add a command that uses"
    " more",
    cel="!has(self.resources) || !has(self.resources.gpu) || !has(self.resources.gpu.count)"
    " || self.resources.gpu.count <= 1 || (has(self.command) && size(self.command) > 0)",
    is_valid=lambda data: data.get("resources", {}).get("gpu", {}).get("count", 1) <= 1 or bool(data.get("command")),
)
"""Applies to stages that run to completion. The engine of `deploy` may use several."""


class StageSpec(WithRules):
    """Settings of the stage's container."""

    name: ClassVar[str]
    """Name of the stage: key in the spec, part of the Job's name, sub-command of the trainer."""
    condition: ClassVar[str]
    """Type of the stage's condition, in the past tense."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Stages that must be done before this one starts."""
    pool: ClassVar[str]
    """Node pool for which the stage is made."""
    runs_server: ClassVar[bool] = False
    """Whether the stage leaves a server running, on a cluster that supports it."""
    non_identity_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields of the stage that change how it runs and never its result."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="env",
            message="names with the prefix FINETUNE_ are reserved for the stage contract; only FINETUNE_METRICS_PORT"
            " and FINETUNE_GIT_SHA may be set",
            cel="!has(self.env) || self.env.all(name, !name.startsWith('FINETUNE_')"
            " || name in ['FINETUNE_METRICS_PORT', 'FINETUNE_GIT_SHA'])",
            is_valid=lambda data: all(
                name in USER_SETTABLE or not name.startswith(RESERVED_PREFIX) for name in data.get("env", {})
            ),
        ),
    )

    image: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    """Container image that replaces the trainer's. A local run ignores it, because it uses no containers."""

    command: tuple[Argument, ...] = Field(default=(), max_length=64)
    """Program that replaces the trainer. It must keep the stage contract: environment, folders, exit codes, result."""

    args: tuple[Argument, ...] = Field(default=(), max_length=256)
    """Arguments of command. For deploy without command: additional arguments of the engine, on a cluster only."""

    resources: Resources = Resources()
    """Resource requests of the stage's pod."""

    placement: Placement = Placement()
    """Nodes on which the stage's pod may run."""

    env: dict[VariableName, Argument] = Field(default_factory=dict, max_length=128)
    """Environment variables of the process."""

    secret_refs: tuple[ObjectName, ...] = Field(default=(), max_length=16)
    """Secrets of the namespace whose keys become environment variables. A local run uses your environment instead."""

    service_account_name: ObjectName | None = None
    """ServiceAccount of the pod, for example for access to a cloud. Its token for the cluster is not mounted."""

    priority_class_name: ObjectName | None = None
    """PriorityClass of the pod, which orders scheduling and preemption."""

    timeout_seconds: int | None = Field(default=None, ge=1, le=31_536_000)
    """Limit for the running time of all attempts of the stage together. Waiting time does not count."""

    retries: Retries = Retries()
    """How often the stage is retried after failures and interruptions."""

    @abstractmethod
    def config(self, context: ConfigContext) -> StageConfig:
        """Return the config of the stage's process, with an empty identity."""

    def serving(self, config: StageConfig) -> Serving | None:  # noqa: ARG002  for overrides
        """Return the server that the stage leaves running on a cluster, or None."""
        return None

    def source_uris(self) -> tuple[str, ...]:
        """Return the URIs of inputs besides the model, the data set and results of other stages."""
        return ()

    def skip_reason(self, gate: GateStatus | None) -> str | None:  # noqa: ARG002  for overrides
        """Return why the requested stage is skipped, or None if it is not."""
        return None

    def evaluate_gate(self, result: AnyResult) -> GateStatus | None:  # noqa: ARG002  for overrides
        """Return the comparison of a result with the stage's gate, or None without a gate."""
        return None


class GatedSpec(StageSpec):
    """A stage that may depend on the gate. It has effects outside the workspace, so it never runs on spot nodes."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="placement.capacity",
            message="must be on-demand: this stage writes outside the workspace, and half a write cannot be undone",
            cel="!has(self.placement) || !has(self.placement.capacity) || self.placement.capacity != 'spot'",
            is_valid=lambda data: data.get("placement", {}).get("capacity") != "spot",
        ),
    )

    when: Literal["Always", "GatePassed"] = "Always"
    """Always, or GatePassed: run only if the score passes evaluate.gate."""

    @override
    def skip_reason(self, gate: GateStatus | None) -> str | None:
        failed = gate is not None and gate.measured and not gate.passed
        return gate.message if gate and failed and self.when == "GatePassed" else None


def recipe_from(spec: ContractModel, recipe: type[R]) -> R:
    """Return the recipe part of a spec that inherits from both StageSpec and the recipe."""
    fields: dict[str, Any] = {name: getattr(spec, name) for name in recipe.model_fields}
    return recipe(**fields)
