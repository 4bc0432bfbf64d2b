"""The base of all stages: how a stage's container runs, and the interface that the core uses."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field
from typing_extensions import override

from finetune_operator.api.costs import PipelineCosts
from finetune_operator.api.placement import AUTO, SPOT, Placement
from finetune_operator.api.rules import Rule, WithRules
from finetune_operator.api.stages.pod import (
    IS_ACCELERATOR,
    Pod,
    PodDefaults,
    is_accelerator,
)
from finetune_operator.api.status import GateStatus, StageStatus
from finetune_trainer.contract import (
    AnyResult,
    ContractModel,
    DatasetSource,
    ModelSource,
    StageConfig,
    Tracking,
    Validation,
)
from finetune_trainer.contract.smoke_test import Question

R = TypeVar("R", bound=ContractModel)


@dataclass(frozen=True)
class ConfigContext:
    """The inputs from which a stage builds the config of its process."""

    pipeline: str
    """Key of the pipeline: namespace/name."""
    seed: int
    model: ModelSource
    datasets: tuple[DatasetSource, ...]
    validation: Validation
    specs: Mapping[str, "StageSpec"]
    """Specs of all requested stages, by name."""
    identities: Mapping[str, str]
    """Identities of the requested stages before this one, by name."""
    statuses: Mapping[str, StageStatus]
    """Statuses of all stages before this one, by name."""
    tracking: Tracking | None = None
    """Experiment trackers, with the name of the run."""
    costs: Callable[[], PipelineCosts | None] = lambda: None
    """Returns the running time and money so far, or None without prices."""


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
    # The fields below have defaults: the annotation of an older Deployment lacks them.
    conversations: bool = False
    """Whether the prompt is sent as a message of a conversation."""
    expect: str | None = None
    """Text that the answer must contain."""

    @property
    def question(self) -> Question:
        """The question to the server, with the condition on its answer."""
        return Question(self.prompt, self.max_tokens, self.conversations, self.expect)


HAS_COMMAND = "has(self.pod) && has(self.pod.command) && size(self.pod.command) > 0"

# A server passes `args` to its engine instead.
ARGS_NEED_COMMAND = Rule(
    field="pod.args",
    message="has no effect without command, because the trainer takes no arguments: add command, or remove args",
    reason="FieldValueForbidden",
    cel=f"!has(self.pod) || !has(self.pod.args) || size(self.pod.args) == 0 || ({HAS_COMMAND})",
    is_valid=lambda data: (
        not data.get("pod", {}).get("args") or bool(data["pod"].get("command"))
    ),
)
"""Applies to stages that run to completion."""


def _one_accelerator(pod: str, users: str, fix: str, exempt: str = "") -> Rule:
    """Return the rule that no limit of this pod asks for several accelerators. `exempt` is CEL for exceptions."""
    limits = f"self.{pod}.resources.limits"
    return Rule(
        field=f"{pod}.resources.limits",
        message=f"has more than one accelerator, and {users} one: set 1, or {fix}",
        cel=f"!has(self.{pod}) || !has(self.{pod}.resources) || !has({limits}){exempt}"
        f" || {limits}.all(name, !({IS_ACCELERATOR}) || string({limits}[name]) in ['0', '1'])",
        is_valid=lambda data: (
            all(
                str(count) in {"0", "1"}
                for name, count in data.get(pod, {})
                .get("resources", {})
                .get("limits", {})
                .items()
                if is_accelerator(name)
            )
            or bool(data[pod].get("command"))
        ),
    )


# `train` starts a process for each accelerator, and the engine of `deploy` may use several.
ONE_GPU = _one_accelerator(
    "pod",
    "this stage uses",
    "add a command that uses more",
    exempt=f" || ({HAS_COMMAND})",
)
"""Applies to stages of a single process."""

ONE_DEFAULT_GPU = _one_accelerator(
    "podDefaults", "most stages use", "set more in the pod of a stage that uses more"
)
"""The same for the defaults, which lie below stages without a command."""


# A stage is a class: the core learns everything about a stage here, so that a new stage needs a file and a field of
# PipelineSpec, and no change of the planner.
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
    publishes: ClassVar[bool] = False
    """Whether the result is a published model, which a pipeline in a new cluster may adopt."""
    non_identity_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields of the stage that change how it runs and never its result."""
    in_place_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields that the operator changes in a running server. They are in no hash."""

    # A node selector of the pod replaces the selector of the pool.
    pod: Pod = Pod()
    """The stage's pod, in the shapes of core/v1."""

    placement: Placement = Placement()
    """Capacity on which the stage's pod runs."""

    max_runtime_seconds: int | None = Field(default=None, ge=1, le=31_536_000)
    """Limit for the running time of all attempts of the stage together. Waiting time does not count."""

    max_pending_seconds: int = Field(default=3600, ge=0, le=31_536_000)
    """Time for which an attempt may wait for what a person must mend: a refused pod, an admission webhook, an image, an
    object that it names, its container or a volume. Then the stage fails and frees its nodes. A wait for nodes or
    quota does not count. For deploy also the time from a server's start until it is ready. 0: no limit."""

    max_silence_seconds: int = Field(default=1800, ge=0, le=31_536_000)
    """Time without a sign of work (a batch, record, answer or token, or a megabyte read or written) after which the
    stage's process counts as hanging and ends itself, as a failed attempt. 0: never. A server on a cluster has a
    liveness probe instead, and a program of your own may read the limit."""

    max_failures: int = Field(default=3, ge=0, le=100)
    """Number of failed attempts that are retried. The next failed attempt fails the stage."""

    max_interruptions: int = Field(default=20, ge=0, le=1000)
    """Number of interrupted attempts (evictions, lost nodes) that are retried. The next fails the stage."""

    @property
    def shares_memory(self) -> bool:
        """Whether the pod gets a volume of memory at /dev/shm, where data loaders and NCCL exchange tensors."""
        return self.pod.shared_memory is not None or self.pod.may_have_devices

    def over(self, defaults: PodDefaults | None) -> Self:
        """Return this stage with the defaults below its pod."""
        if defaults is None:
            return self
        return self.model_copy(update={"pod": self.pod.over(defaults)})

    @abstractmethod
    def config(self, context: ConfigContext) -> StageConfig:
        """Return the config of the stage's process, with an empty identity."""

    def serving(self, config: StageConfig) -> Serving | None:  # noqa: ARG002  for overrides
        """Return the server that the stage leaves running on a cluster, or None."""
        return None

    @property
    def pods(self) -> int:
        """Pods of an attempt. Several start and end together: all or none of them."""
        return 1

    @property
    def checkpoint_interval(self) -> timedelta | None:
        """Longest time between two checkpoints. None: the stage has none, and begins again after an interruption."""
        return None

    def source_uris(self) -> tuple[str, ...]:
        """Return the URIs of inputs besides the model, the data sets and results of other stages."""
        return ()

    def published_uris(self) -> tuple[str, ...]:
        """Return the URIs below which the stage publishes models."""
        return ()

    def adopted_result(self, uri: str, digest: str, identity: str) -> AnyResult | None:  # noqa: ARG002  for overrides
        """Return the result as if the stage had published this model; None if it publishes to no such place."""
        return None

    def adoption_problem(self, result: AnyResult) -> str | None:  # noqa: ARG002  for overrides
        """Return why the stage cannot go on with this adopted result, and the fix; None if it can."""
        return None

    def early_checks(self) -> list[str]:
        """Return what the stage's process checks at its start, besides what determines the result.

        After an edit of it, a failed stage is tried again.
        """
        return []

    def skip_reason(self, gates: tuple[GateStatus, ...]) -> str | None:  # noqa: ARG002  for overrides
        """Return why the requested stage is skipped, or None if it is not."""
        return None

    def compare_with_gates(self, result: AnyResult) -> tuple[GateStatus, ...]:  # noqa: ARG002  for overrides
        """Return the comparison of a result with each of the stage's gates."""
        return ()


class GatedSpec(StageSpec):
    """A stage that may depend on the gates. It has effects outside the workspace, so it never runs on spot nodes."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="placement.capacity",
            message="must be OnDemand: this stage writes outside the workspace, and half a write cannot be undone",
            cel="!has(self.placement) || !has(self.placement.capacity)"
            " || !(self.placement.capacity in ['Spot', 'Auto'])",
            is_valid=lambda data: (
                data.get("placement", {}).get("capacity") not in {SPOT, AUTO}
            ),
        ),
    )

    when: Literal["Always", "GatesPassed"] = "Always"
    """Always, or GatesPassed: run only if the scores pass all of evaluate.gates."""

    @override
    def skip_reason(self, gates: tuple[GateStatus, ...]) -> str | None:
        if self.when != "GatesPassed":
            return None
        # A gate without a measured score skips nothing: it is a mistake in the spec, not a bad score.
        failed = [gate.message for gate in gates if gate.measured and not gate.passed]
        return "; ".join(failed) or None


def recipe_from(spec: ContractModel, recipe: type[R]) -> R:
    """Return the recipe part of a spec that inherits from the recipe and from WithRules."""
    # Only the recipe's fields: fields of the pod or of retries must not reach the identity.
    fields: dict[str, Any] = {name: getattr(spec, name) for name in recipe.model_fields}
    return recipe(**fields)
