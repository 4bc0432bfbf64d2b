"""What commands read of a spec and of a status by the names of the fields.

A field that is renamed in the API is renamed here, and in no other module of the command line but `template.yaml`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from finetune_operator.api.gates import COMPARISONS, Comparison
from finetune_operator.api.spec import PipelineSpec
from finetune_operator.api.stages.base import StageSpec
from finetune_operator.api.stages.pod import PodDefaults
from finetune_operator.api.status import PipelineStatus

Location = tuple[str | int, ...]
"""Keys and indexes below `spec`."""
LOCAL_POD_FIELDS = frozenset({"command", "args", "env", "env_from"})
"""Fields of a pod that have an effect in a run on this machine."""
PATHS_OF_CONFIG_FIELDS = {
    **{name: f"spec.{name}" for name in ("seed", "model", "datasets", "validation")},
    "objective": "spec.train.objective",
    "startFrom": "spec.train.startFrom",
}
"""Fields of a stage's config that are fields of the spec itself or of another stage, by their paths in the manifest."""


@dataclass(frozen=True)
class Source:
    """An input that the trainer reads, or a target that it publishes to."""

    location: Location
    uri: str
    kind: Literal["model", "adapter", "data", "task", "target"]
    stage: str
    """The first stage that uses it."""
    revision: str | None = None
    config: str | None = None
    split: str | None = None


@dataclass(frozen=True)
class GateMetric:
    """The metric that a gate compares."""

    location: Location
    value_location: Location
    task: str
    metric: str
    operator: Comparison
    value: float
    against_base: bool
    """Whether the difference from the base model's score is compared."""

    @property
    def words(self) -> str:
        """The operator in words, for example above."""
        return COMPARISONS[self.operator][1]

    def can_pass(self, lowest: float, highest: float) -> bool:
        """Return whether any number in this range passes the gate."""
        holds, _ = COMPARISONS[self.operator]
        return any(holds(score, self.value) for score in (lowest, highest))


@dataclass(frozen=True)
class LiteralVariable:
    """An environment variable whose value is in the manifest."""

    location: Location
    name: str
    value: str


@dataclass(frozen=True)
class Workload:
    """What determines the number of optimizer steps."""

    epochs: float | None
    max_steps: int | None
    examples_per_step: int
    context_length: int
    pairs: bool = False
    """Whether an example is a pair of two rows, and not a row."""
    nodes: int = 1
    processes: int = 1
    """Processes of all nodes."""

    @property
    def example(self) -> str:
        """What a step has several of."""
        return "pair" if self.pairs else "row"

    def examples(self, rows: int) -> int:
        """Return the number of examples in so many rows of prepare."""
        return rows // 2 if self.pairs else rows

    def steps(self, rows: int) -> int:
        """Return the number of optimizer steps for so many rows of prepare, as the trainer computes it."""
        if self.epochs is None:
            return self.max_steps or 0
        return math.ceil(max(1, round(self.epochs * self.examples(rows))) / self.examples_per_step)


def has_own_program(stage: StageSpec | None) -> bool:
    """Return whether the user brings the stage's program, which may read whatever it likes."""
    return stage is not None and bool(stage.pod.command)


def sources(spec: PipelineSpec) -> Iterator[Source]:
    """Yield the inputs that stages of the trainer read; those of a program of the user are unknown."""
    trainers_own = [
        name
        for name, stage in spec.stages().items()
        if not has_own_program(stage) and name != "deploy"
    ]
    if trainers_own:
        yield Source(
            ("model", "uri"), spec.model.uri, "model", trainers_own[0], spec.model.revision
        )
    if "train" in trainers_own and spec.train.start_from:
        start = spec.train.start_from
        yield Source(("train", "startFrom", "uri"), start.uri, "adapter", "prepare", start.revision)
    if "prepare" in trainers_own:
        data = [
            (("datasets", number, "uri"), dataset) for number, dataset in enumerate(spec.datasets)
        ]
        validation = spec.validation.dataset()
        for location, one in [
            *data,
            *([(("validation", "uri"), validation)] if validation else []),
        ]:
            yield Source(location, one.uri, "data", "prepare", one.revision, one.config, one.split)
    if "evaluate" in trainers_own and spec.evaluate:
        for number, task in enumerate(spec.evaluate.tasks):
            if task.file:
                yield Source(("evaluate", "tasks", number, "file"), task.file, "task", "evaluate")


def targets(spec: PipelineSpec) -> Iterator[Source]:
    """Yield the targets that push of the trainer publishes to."""
    if spec.push and not has_own_program(spec.stages()["push"]):
        for number, target in enumerate(spec.push.targets):
            yield Source(("push", "targets", number, "uri"), target.uri, "target", "push")


def has_cluster_credentials(spec: PipelineSpec, stage: str) -> bool:
    """Return whether a stage takes variables or an identity from objects of the cluster, such as Secrets."""
    pod = spec.stages()[stage].pod
    return bool(pod.env_from or pod.service_account_name or any(one.value_from for one in pod.env))


def task_files(spec: PipelineSpec) -> dict[str, str]:
    """Return task -> URI of its file, for the tasks that have one."""
    tasks = spec.evaluate.tasks if spec.evaluate else ()
    return {task.name: task.file for task in tasks if task.file}


def built_in_tasks(spec: PipelineSpec) -> Iterator[tuple[Location, str]]:
    """Yield location and name of the tasks of lm-eval itself; those of a program of the user are unknown."""
    if spec.evaluate and not has_own_program(spec.evaluate):
        for number, task in enumerate(spec.evaluate.tasks):
            if not task.file:
                yield ("evaluate", "tasks", number, "name"), task.name


def gate_metrics(spec: PipelineSpec) -> Iterator[GateMetric]:
    """Yield the metric of every gate on scores of the trainer; a program of the user measures whatever it likes."""
    if spec.evaluate is None or has_own_program(spec.evaluate):
        return
    for number, gate in enumerate(spec.evaluate.gates):
        path = ("evaluate", "gates", number)
        compared = (gate.operator, gate.value, gate.against == "Base")
        yield GateMetric((*path, "metric"), (*path, "value"), gate.task, gate.metric, *compared)


def literal_variables(spec: PipelineSpec) -> Iterator[LiteralVariable]:
    """Yield the environment variables whose values are in the manifest."""
    pods: dict[Location, PodDefaults | None] = {("podDefaults",): spec.pod_defaults}
    pods |= {
        (name, "pod"): getattr(spec, name).pod for name in spec.stages()
    }  # without the defaults
    for path, pod in pods.items():
        for number, variable in enumerate(pod.env if pod else ()):
            if variable.value is not None:
                yield LiteralVariable(
                    (*path, "env", number, "value"), variable.name, variable.value
                )


def workload(spec: PipelineSpec) -> Workload:
    """Return what determines the number of optimizer steps."""
    train = spec.train
    examples = train.micro_batch_size * train.gradient_accumulation_steps * train.processes
    return Workload(
        epochs=train.effective_epochs(),
        max_steps=train.max_steps,
        examples_per_step=examples,
        context_length=spec.prepare.context_length,
        pairs=train.objective == "DPO",
        nodes=train.nodes,
        processes=train.processes,
    )


def without_effect(spec: PipelineSpec) -> list[str]:
    """Return the paths of the fields that the manifest sets and that only a cluster uses."""
    found = ["spec.deadline"] if spec.deadline else []
    found += _cluster_only("spec.podDefaults", spec.pod_defaults)
    for name in spec.stages():
        stage: StageSpec = getattr(spec, name)  # as in the manifest, without the defaults
        counted = frozenset(
            {"resources"} if stage.pod.resources.accelerators > 1 and stage is spec.train else ()
        )
        found += _cluster_only(
            f"spec.{name}.pod", stage.pod, counted
        )  # each accelerator is a process here, too
        found += [f"spec.{name}.placement"] if "placement" in stage.model_fields_set else []
    return found


def _cluster_only(
    path: str, pod: PodDefaults | None, used: frozenset[str] = frozenset()
) -> Iterator[str]:
    if pod:
        for name, field in type(pod).model_fields.items():
            if name in pod.model_fields_set - LOCAL_POD_FIELDS - used:
                yield f"{path}.{field.alias}"


def gate_lines(status: PipelineStatus) -> list[str]:
    """Return for every gate with a score whether it is open, with the reason."""
    return [f"gate {'open' if gate.passed else 'closed'}: {gate.message}" for gate in status.gates]


def score_of(status: Mapping[str, Any]) -> str:
    """Return the score of the gate, or the first one that was measured; empty before it is known.

    `status` is the status as JSON, which another version of the operator may have written.
    """
    for gate in status.get("gates") or ():
        if gate.get("score") is not None:
            return f"{gate.get('metric')} {gate['score']:.4g}"
    stages = {stage.get("name"): stage for stage in status.get("stages") or ()}
    evaluated = (stages.get("evaluate") or {}).get("result") or {}
    for metrics in (evaluated.get("scores") or {}).values():
        for metric, score in metrics.items():
            value = score.get("value")
            return (
                f"{metric} {value:.4g}" if isinstance(value, int | float) else f"{metric} {value}"
            )
    return ""
