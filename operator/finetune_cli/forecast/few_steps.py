"""Warns of a training with so few steps that it learns nothing."""

from finetune_cli.manifest.fields import workload
from finetune_operator.api.spec import PipelineSpec
from finetune_trainer.contract.step_size import few_steps


def few_steps_line(spec: PipelineSpec, rows: int) -> str | None:
    """Return the warning for so many rows of prepare; None if there are enough steps."""
    work = workload(spec)
    examples = work.examples(rows)
    # A user who sets maxSteps to 1 means it.
    if work.max_steps and work.examples_per_step <= examples:
        return None
    steps = work.steps(rows)
    warning = few_steps(steps, examples, work.examples_per_step, work.example)
    if warning is None:
        return None
    return f"train: {warning}"
