"""Rules about fields that another choice leaves without an effect.

Each is refused, so that no user waits for what a field cannot do. They are harmless: a stored object that breaks one of
them goes on. A field whose default the API server stores is refused if it differs from that default.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from finetune_operator.api.placement import AUTO
from finetune_operator.api.rules import Detail, Rule
from finetune_operator.api.stages.base import HAS_COMMAND
from finetune_operator.api.stages.held_out import IS_HELD_OUT, is_held_out
from finetune_operator.api.stages.pod import IS_ACCELERATOR, is_accelerator
from finetune_trainer.contract import Optimizer

Data = Mapping[str, Any]

CLAIM_SIZE = "50Gi"
"""Size of the operator's claim if the manifest names none."""
CLAIM_ACCESS_MODE = "ReadWriteOnce"
"""Access mode of the operator's claim if the manifest names none."""
STORED_DEFAULTS = {
    "size": CLAIM_SIZE,
    "accessMode": CLAIM_ACCESS_MODE,
    "whenDeleted": "Retain",
}
"""Values that API servers have stored in each workspace, before they were no defaults of the schema."""


def _ignored(
    field: str,
    message: str,
    cel: str,
    is_valid: Callable[[Data], bool],
    details: Callable[[Data], Iterator[Detail]] | None = None,
) -> Rule:
    return Rule(
        field=field,
        message=message,
        reason="FieldValueForbidden",
        cel=cel,
        is_valid=is_valid,
        details=details,
        is_harmless=True,
    )


def _of_own_claim(field: str) -> Rule:
    """Return the rule that a field of the operator's claim is not set beside a claim of the user."""
    cel = f"!has(self.existingClaim) || !has(self.{field})"
    if field in STORED_DEFAULTS:
        # No manifest has it, so no client can remove it: a later manifest may name a claim.
        was_stored = f"oldSelf.hasValue() && has(oldSelf.value().{field})"
        cel += (
            f" || ({was_stored} && string(self.{field}) == '{STORED_DEFAULTS[field]}')"
        )
    return _ignored(
        field,
        "has no effect beside existingClaim, a claim that the operator neither makes nor changes: remove either",
        cel,
        lambda data: "existingClaim" not in data or field not in data,
    )


IGNORED_WITH_CLAIM = tuple(
    map(_of_own_claim, ("size", "storageClassName", "accessMode", "whenDeleted"))
)
"""Rules of a workspace."""


def _optimizer(
    field: str, users: str, is_used: str, uses: Callable[[str], bool]
) -> Rule:
    """Return the rule that a fraction of the optimizer has its default with a scheduler that ignores it.

    `is_used` is CEL about `self.optimizer.scheduler`, which the API server always has beside a fraction.
    """
    name = Optimizer.model_fields[field].alias or field
    default = float(Optimizer.model_fields[field].default)
    place = f"self.optimizer.{name}"
    return _ignored(
        f"optimizer.{name}",
        f"has no effect with this scheduler: set optimizer.scheduler to {users}, or remove {name}",
        f"!has(self.optimizer) || !has({place}) || {place} == {default} || {is_used}",
        lambda data: (
            data["optimizer"].get(name, default) == default
            or uses(data["optimizer"]["scheduler"])
        ),
    )


_LIMITS = "self.pod.resources.limits"
_DEVICES = f"{_LIMITS}.filter(name, {IS_ACCELERATOR} && string({_LIMITS}[name]) != '0')"
_SEVERAL_DEVICES = (
    f"has(self.pod) && has(self.pod.resources) && has({_LIMITS}) && ({_DEVICES}.size() > 1"
    f" || {_DEVICES}.exists(name, string({_LIMITS}[name]) != '1'))"
)


def _has_several_processes(data: Data) -> bool:
    """Return whether more than one process trains, as far as the trainer starts them."""
    per_node = data.get("processesPerNode")
    if per_node is None:
        limits = data["pod"].get("resources", {}).get("limits", {})
        counts = [str(limits[name]) for name in limits if is_accelerator(name)]
        per_node = sum(int(count) for count in counts if count.isdigit())
    return data["nodes"] > 1 or per_node > 1


IGNORED_IN_TRAIN = (
    _optimizer(
        "decay_fraction",
        "WarmupStableDecay",
        "self.optimizer.scheduler == 'WarmupStableDecay'",
        lambda scheduler: scheduler == "WarmupStableDecay",
    ),
    _optimizer(
        "min_learning_rate_fraction",
        "Cosine, Linear or WarmupStableDecay",
        "self.optimizer.scheduler != 'Constant'",
        lambda scheduler: scheduler != "Constant",
    ),
    _ignored(
        "parallelism",
        "FSDP shards over several processes, and this training has one: set DDP, or more nodes or accelerators",
        "!has(self.parallelism) || self.parallelism == 'DDP'"
        f" || ({HAS_COMMAND}) || (has(self.nodes) && self.nodes > 1)"
        f" || (has(self.processesPerNode) ? self.processesPerNode > 1 : ({_SEVERAL_DEVICES}))",
        lambda data: (
            data["parallelism"] == "DDP"
            or bool(data["pod"].get("command"))
            or _has_several_processes(data)
        ),
    ),
)
"""Rules of train."""


def _about_questions(field: str) -> Rule:
    """Return the rule that a field about the questions of lm-eval is not set without such questions."""
    return _ignored(
        field,
        "is about the questions of tasks, and held_out asks none: remove it, or add a task of lm-eval",
        f"!has(self.{field}) || self.tasks.exists(task, !{IS_HELD_OUT})",
        lambda data: (
            field not in data or not all(is_held_out(task) for task in data["tasks"])
        ),
    )


IGNORED_IN_EVALUATE = tuple(
    _about_questions(field)
    for field in (
        "applyChatTemplate",
        "fewshotAsMultiturn",
        "systemInstruction",
        "batchSize",
    )
)
"""Rules of evaluate."""

NOT_PUBLIC = "only hf:// has repositories that may be public: remove private"


def _public_elsewhere(data: Data) -> Iterator[Detail]:
    for number, target in enumerate(data["targets"]):
        is_on_hub = target["uri"].startswith("hf://")
        if target.get("private") is False and not is_on_hub:
            yield ("targets", number, "private"), NOT_PUBLIC


IGNORED_IN_PUSH = (
    _ignored(
        "targets",
        NOT_PUBLIC,
        "self.targets.all(target, !has(target.private) || target.private || target.uri.startsWith('hf://'))",
        lambda data: not any(_public_elsewhere(data)),
        _public_elsewhere,
    ),
)
"""Rules of push."""


def _has_auto(spec: Data) -> bool:
    stages = (spec.get(name, {}) for name in ("prepare", "train", "evaluate"))
    return any(stage.get("placement", {}).get("capacity") == AUTO for stage in stages)


def _casts_weights(spec: Data) -> bool:
    """Return whether merged weights are published or evaluated."""
    targets = spec["push"]["targets"]
    is_published = any(target.get("format", "Merged") == "Merged" for target in targets)
    return is_published or spec.get("evaluate", {}).get("weights") == "Merged"


def _capacity(stage: str, default: str) -> str:
    """Return CEL for the capacity of a stage, which may be absent."""
    return f"self.?{stage}.?placement.?capacity.orValue('{default}')"


_TRACKING = "has(self.tracking)"
_TRACKERS = ("mlflow", "wandb", "tensorboard")
_HAS_TRACKER = " || ".join(f"has(self.tracking.{name})" for name in _TRACKERS)


def _about_validation(field: str, use: str) -> Rule:
    """Return the rule that a field of train that needs validations is not set without them."""
    return _ignored(
        f"train.{field}",
        f"{use}, and there is none: set validation.fraction above 0, or validation.uri",
        f"!has(self.train) || !has(self.train.{field}) || !has(self.validation)"
        " || !has(self.validation.fraction) || self.validation.fraction > 0.0",
        lambda data: (
            field not in data["train"] or data["validation"].get("fraction") != 0
        ),
    )


IGNORED_IN_SPEC = (
    _ignored(
        "deadline",
        "has no effect, because no stage has capacity Auto: set placement.capacity of a stage, or remove deadline",
        f"!has(self.deadline) || {_capacity('train', AUTO)} == '{AUTO}'"
        f" || {_capacity('prepare', '')} == '{AUTO}' || {_capacity('evaluate', '')} == '{AUTO}'",
        lambda data: "deadline" not in data or _has_auto(data),
    ),
    _ignored(
        "prepare.packing",
        "has no effect with train.objective DPO, whose rows have a single completion each: remove packing",
        "self.?prepare.?packing.orValue(true) || self.?train.?objective.orValue('SFT') != 'DPO'",
        lambda data: data["prepare"]["packing"] or data["train"]["objective"] != "DPO",
    ),
    _about_validation("samples", "are made at each validation"),
    _about_validation("evalSteps", "is the time between validations"),
    _about_validation("earlyStopping", "needs the losses of validations"),
    _ignored(
        "push.dtype",
        "is the type of merged weights, and no target has them: remove dtype, or add a target of format Merged",
        "self.?push.?dtype.orValue('BF16') == 'BF16'"
        " || self.push.targets.exists(target, !has(target.format) || target.format == 'Merged')"
        " || self.?evaluate.?weights.orValue('') == 'Merged'",
        lambda data: (
            data.get("push", {}).get("dtype", "BF16") == "BF16" or _casts_weights(data)
        ),
    ),
    _ignored(
        "tracking.runName",
        "names a run, and there is no tracker: add mlflow, wandb or tensorboard, or remove runName",
        f"!{_TRACKING} || !has(self.tracking.runName) || {_HAS_TRACKER}",
        lambda data: (
            "runName" not in data.get("tracking", {})
            or any(name in data["tracking"] for name in _TRACKERS)
        ),
    ),
    _ignored(
        "tracking.mlflow.registeredModel",
        "gets its versions from push: add push, or remove registeredModel",
        f"!{_TRACKING} || !has(self.tracking.mlflow) || !has(self.tracking.mlflow.registeredModel) || has(self.push)",
        lambda data: (
            "registeredModel" not in data.get("tracking", {}).get("mlflow", {})
            or "push" in data
        ),
    ),
)
"""Rules of the spec."""
