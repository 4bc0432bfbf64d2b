"""Rules about held_out, the task of evaluate that measures the validation records."""

from collections.abc import Iterator, Mapping
from typing import Any

from finetune_operator.api.rules import Detail, Rule
from finetune_trainer.contract import HELD_OUT

LOSS = "validation_loss"
ACCURACY = "reward_accuracy"
IS_HELD_OUT = f"(task.name == '{HELD_OUT}' && !has(task.file))"
"""CEL that is true if `task` is held_out: with a file, the name belongs to the user's task."""
NOT_ASKED = "asks no questions and measures all validation records: remove fewShot, limit and allowCode"


def _has_held_out(evaluate: Mapping[str, Any]) -> bool:
    return any(is_held_out(task) for task in evaluate.get("tasks", ()))


def is_held_out(task: Mapping[str, Any]) -> bool:
    """Return whether a task is no task of lm-eval."""
    return task["name"] == HELD_OUT and not task.get("file")


def _with_questions(data: Mapping[str, Any]) -> Iterator[Detail]:
    for number, task in enumerate(data["tasks"]):
        if is_held_out(task) and task.keys() & {"fewShot", "limit", "allowCode"}:
            yield ("tasks", number, "name"), f"{HELD_OUT} {NOT_ASKED}"


def _wrong_gates(data: Mapping[str, Any]) -> Iterator[Detail]:
    """Yield the gates on held_out that no model, or only a worse model, could pass."""
    if not _has_held_out(data):
        return
    for number, gate in enumerate(data.get("gates", ())):
        if gate["task"] != HELD_OUT:
            continue
        metric = gate.get("metric", "acc")
        is_lower = gate.get("operator", "GreaterThan").startswith("LessThan")
        if metric not in (LOSS, ACCURACY):
            text = f"{metric} is not measured by {HELD_OUT}; set metric to {LOSS}"
            yield ("gates", number, "metric"), text
        elif metric == LOSS and not is_lower:
            text = f"{LOSS} is better if it is lower; set operator to LessThan"
            yield ("gates", number, "operator"), text
        elif metric == ACCURACY and gate.get("against") == "Base":
            text = f"the base model has no {ACCURACY}; set against to Value"
            yield ("gates", number, "against"), text


def _accuracy_gates(spec: Mapping[str, Any]) -> Iterator[Detail]:
    evaluate = spec.get("evaluate", {})
    # The command line asks with the manifest as it is, without defaults.
    if spec.get("train", {}).get("objective") == "DPO" or not _has_held_out(evaluate):
        return
    for number, gate in enumerate(evaluate.get("gates", ())):
        if gate["task"] == HELD_OUT and gate.get("metric") == ACCURACY:
            text = f"only DPO has {ACCURACY}; set metric to {LOSS}"
            yield ("evaluate", "gates", number, "metric"), text


HELD_OUT_RULES = (
    Rule(
        field="tasks",
        message=f"{HELD_OUT} {NOT_ASKED}",
        cel=f"self.tasks.all(task, !{IS_HELD_OUT} || (!has(task.fewShot) && !has(task.limit)"
        " && !has(task.allowCode)))",
        is_valid=lambda data: not any(_with_questions(data)),
        details=_with_questions,
        is_harmless=True,
    ),
    Rule(
        field="gates",
        message=f"a gate on {HELD_OUT} needs metric {LOSS} with operator LessThan, or {ACCURACY} against Value",
        cel=f"!has(self.gates) || !self.tasks.exists(task, {IS_HELD_OUT}) || self.gates.all(gate,"
        f" gate.task != '{HELD_OUT}' || (has(gate.metric) && ((gate.metric == '{LOSS}' && has(gate.operator)"
        " && gate.operator.startsWith('LessThan'))"
        f" || (gate.metric == '{ACCURACY}' && (!has(gate.against) || gate.against == 'Value')))))",
        is_valid=lambda data: not any(_wrong_gates(data)),
        details=_wrong_gates,
    ),
)
"""Rules of evaluate."""
SPEC_HAS_HELD_OUT = (
    f"has(self.evaluate) && self.evaluate.tasks.exists(task, {IS_HELD_OUT})"
)
HELD_OUT_SPEC_RULES = (
    Rule(
        field="validation.fraction",
        message=f"{HELD_OUT} of evaluate.tasks needs validation records: set a fraction such as 0.05, or a uri",
        cel=f"!({SPEC_HAS_HELD_OUT}) || !has(self.validation) || !has(self.validation.fraction)"
        " || self.validation.fraction > 0.0",
        is_valid=lambda data: (
            not _has_held_out(data.get("evaluate", {}))
            or data["validation"].get("fraction") != 0
        ),
    ),
    Rule(
        field="evaluate.gates",
        message=f"only DPO has {ACCURACY}: set metric to {LOSS}, or set train.objective to DPO",
        cel=f"!({SPEC_HAS_HELD_OUT} && has(self.evaluate.gates)) || (has(self.train) && has(self.train.objective)"
        f" && self.train.objective == 'DPO') || self.evaluate.gates.all(gate, gate.task != '{HELD_OUT}'"
        f" || !has(gate.metric) || gate.metric != '{ACCURACY}')",
        is_valid=lambda data: not any(_accuracy_gates(data)),
        details=_accuracy_gates,
    ),
)
"""Rules of the spec."""
