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
from finetune_trainer.contract import DatasetSource

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
class UriField:
    """A URI of the manifest: an input that the trainer reads, or a target that it publishes to."""

    location: Location
    uri: str
    kind: Literal["model", "adapter", "data", "template", "task", "target"]
    stage: str
    """The first stage that uses it."""
    revision: str | None = None
    config: str | None = None
    split: str | None = None


@dataclass(frozen=True)
class TaskField:
    """A task of evaluate."""

    location: Location
    name: str
    file: str | None
    few_shot: int | None
    allow_code: bool


@dataclass(frozen=True)
class GateMetric:
    """The metric that a gate compares."""

    location: Location
    value_location: Location
    errors_location: Location
    task: str
    metric: str
    operator: Comparison
    value: float
    against_base: bool
    """Whether the difference from the base model's score is compared."""
    needs_error: bool
    """Whether the standard error is compared, too."""

    @property
    def words(self) -> str:
        """The operator in words, for example above."""
        return COMPARISONS[self.operator][1]

    def can_pass(self, lowest: float, highest: float) -> bool:
        """Return whether any number in this range passes the gate."""
        holds, _ = COMPARISONS[self.operator]
        # Comparisons are monotonic, so one end of the range passes if any number in it does.
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
        """The noun for a part of a step: a pair with DPO, else a row."""
        if self.pairs:
            return "pair"
        return "row"

    def examples(self, rows: int) -> int:
        """Return the number of examples in so many rows of prepare."""
        # Prepare writes a chosen and a rejected row for each pair.
        if self.pairs:
            return rows // 2
        return rows

    def steps(self, rows: int) -> int:
        """Return the number of optimizer steps for so many rows of prepare, as the trainer computes it."""
        if self.epochs is None:
            return self.max_steps or 0
        # A fraction of an epoch trains on at least one example.
        trained_examples = max(1, round(self.epochs * self.examples(rows)))
        return math.ceil(trained_examples / self.examples_per_step)


def has_own_program(stage: StageSpec | None) -> bool:
    """Return whether the user brings the stage's program, which may read whatever it likes."""
    return stage is not None and bool(stage.pod.command)


def sources(spec: PipelineSpec) -> Iterator[UriField]:
    """Yield the inputs that stages of the trainer read; the inputs of a user's own program are unknown."""
    # Deploy reads the model that push has published, which is no field of the manifest.
    readers = [
        name
        for name, stage in spec.stages().items()
        if not has_own_program(stage) and name != "deploy"
    ]
    if readers:
        model = spec.model
        yield UriField(
            ("model", "uri"),
            model.uri,
            "model",
            readers[0],
            model.revision,
        )
    start = spec.train.start_from
    if "train" in readers and start:
        # Prepare pins the adapter, so it is the first stage that reads it.
        yield UriField(
            ("train", "startFrom", "uri"),
            start.uri,
            "adapter",
            "prepare",
            start.revision,
        )
    if "prepare" in readers:
        yield from _datasets(spec)
        template = spec.prepare.chat_template_uri
        if template:
            template_location = ("prepare", "chatTemplate")
            yield UriField(template_location, template, "template", "prepare")
    if "evaluate" in readers and spec.evaluate:
        for number, task in enumerate(spec.evaluate.tasks):
            if task.file:
                task_location = ("evaluate", "tasks", number, "file")
                yield UriField(task_location, task.file, "task", "evaluate")


def _datasets(spec: PipelineSpec) -> Iterator[UriField]:
    datasets: list[tuple[Location, DatasetSource]] = [
        (("datasets", number, "uri"), dataset)
        for number, dataset in enumerate(spec.datasets)
    ]
    validation = spec.validation.dataset()
    if validation:
        datasets.append((("validation", "uri"), validation))
    for location, dataset in datasets:
        yield UriField(
            location,
            dataset.uri,
            "data",
            "prepare",
            dataset.revision,
            dataset.config,
            dataset.split,
        )


def targets(spec: PipelineSpec) -> Iterator[UriField]:
    """Yield the targets that push of the trainer publishes to."""
    if spec.push is None or has_own_program(spec.stages()["push"]):
        return
    for number, target in enumerate(spec.push.targets):
        yield UriField(("push", "targets", number, "uri"), target.uri, "target", "push")


def has_cluster_credentials(spec: PipelineSpec, stage: str) -> bool:
    """Return whether a stage takes variables or an identity from objects of the cluster, such as Secrets."""
    pod = spec.stages()[stage].pod
    if pod.env_from or pod.service_account_name:
        return True
    return any(variable.value_from for variable in pod.env)


def task_files(spec: PipelineSpec) -> dict[str, str]:
    """Return task -> URI of its file, for the tasks that have a file."""
    if spec.evaluate is None:
        return {}
    return {task.name: task.file for task in spec.evaluate.tasks if task.file}


def lm_eval_tasks(spec: PipelineSpec) -> Iterator[TaskField]:
    """Yield the tasks that evaluate of the trainer loads; the tasks of a user's own program are unknown."""
    if spec.evaluate is None or has_own_program(spec.evaluate):
        return
    for number, task in enumerate(spec.evaluate.tasks):
        if task.is_held_out:
            continue
        location = ("evaluate", "tasks", number)
        yield TaskField(
            location=location,
            name=task.name,
            file=task.file,
            few_shot=task.few_shot,
            allow_code=bool(task.allow_code),
        )


def built_in_tasks(spec: PipelineSpec) -> Iterator[tuple[Location, str]]:
    """Yield location and name of lm-eval's own tasks."""
    for task in lm_eval_tasks(spec):
        if not task.file:
            yield (*task.location, "name"), task.name


def gate_metrics(spec: PipelineSpec) -> Iterator[GateMetric]:
    """Yield the metric of every gate on scores of the trainer; a program of the user measures whatever it likes."""
    if spec.evaluate is None or has_own_program(spec.evaluate):
        return
    for number, gate in enumerate(spec.evaluate.gates):
        path = ("evaluate", "gates", number)
        yield GateMetric(
            location=(*path, "metric"),
            value_location=(*path, "value"),
            errors_location=(*path, "standardErrors"),
            task=gate.task,
            metric=gate.metric,
            operator=gate.operator,
            value=gate.value,
            against_base=gate.against == "Base",
            needs_error=gate.standard_errors > 0,
        )


def literal_variables(spec: PipelineSpec) -> Iterator[LiteralVariable]:
    """Yield the environment variables whose values are in the manifest."""
    for path, pod in pods(spec).items():
        for number, variable in enumerate(pod.env):
            if variable.value is not None:
                location = (*path, "env", number, "value")
                yield LiteralVariable(location, variable.name, variable.value)


def pods(spec: PipelineSpec) -> dict[Location, PodDefaults]:
    """Return the settings of pods by their locations in the manifest."""
    settings: dict[Location, PodDefaults | None] = {("podDefaults",): spec.pod_defaults}
    for name in spec.stages():
        # From the spec and not from stages(), which adds the defaults: their values have locations of their own.
        settings[name, "pod"] = getattr(spec, name).pod
    return {path: pod for path, pod in settings.items() if pod is not None}


def workload(spec: PipelineSpec) -> Workload:
    """Return what determines the number of optimizer steps."""
    train = spec.train
    examples = (
        train.micro_batch_size * train.gradient_accumulation_steps * train.processes
    )
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
    paths = []
    if spec.deadline:
        paths.append("spec.deadline")
    paths += _cluster_only("spec.podDefaults", spec.pod_defaults)
    for name in spec.stages():
        # As in the manifest, without the defaults.
        stage: StageSpec = getattr(spec, name)
        used: frozenset[str] = frozenset()
        if stage is spec.train and stage.pod.resources.accelerators > 1:
            # Each accelerator is a process here, too.
            used = frozenset({"resources"})
        paths += _cluster_only(f"spec.{name}.pod", stage.pod, used)
        if "placement" in stage.model_fields_set:
            paths.append(f"spec.{name}.placement")
    return paths


def _cluster_only(
    path: str, pod: PodDefaults | None, used: frozenset[str] = frozenset()
) -> Iterator[str]:
    if pod is None:
        return
    unused = pod.model_fields_set - LOCAL_POD_FIELDS - used
    for name, field in type(pod).model_fields.items():
        if name in unused:
            yield f"{path}.{field.alias}"


def gate_lines(status: PipelineStatus) -> list[str]:
    """Return for every gate with a score whether it is open, with the reason."""
    lines = []
    for gate in status.gates:
        state = "closed"
        if gate.passed:
            state = "open"
        lines.append(f"gate {state}: {gate.message}")
    return lines


def score_of(status: Mapping[str, Any], *, gain: bool = False) -> str:
    """Return the score of the gate, or the first score that was measured, beside the base model's if it is known.

    With `gain`, the difference from the base model follows with its error. Empty before a score is known.

    `status` is the status as JSON, which another version of the operator may have written.
    """
    for gate in status.get("gates") or ():
        if gate.get("score") is not None:
            return (
                f"{gate.get('metric')} {_beside_base(gate, gate['score'], gain=gain)}"
            )
    stages = {stage.get("name"): stage for stage in status.get("stages") or ()}
    evaluate = stages.get("evaluate") or {}
    result = evaluate.get("result") or {}
    for metrics in (result.get("scores") or {}).values():
        for metric, score in metrics.items():
            return f"{metric} {_beside_base(score, score.get('value'), gain=gain)}"
    return ""


def _beside_base(score: Mapping[str, Any], value: Any, *, gain: bool) -> str:
    base = score.get("base")
    if base is None:
        return _number(value)
    text = f"{_number(base)} → {_number(value)}"
    is_known = isinstance(base, int | float) and isinstance(value, int | float)
    if not gain or not is_known:
        return text
    difference = f"{value - base:+.3g}"
    stderr = score.get("differenceStderr")
    if isinstance(stderr, int | float):
        difference += f" ± {stderr:.2g}"
    return f"{text} ({difference})"


def _number(value: Any) -> str:
    # JSON has no NaN: the status holds such a score as a string.
    if isinstance(value, int | float):
        return f"{value:.4g}"
    return str(value)
