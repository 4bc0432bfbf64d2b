"""Whether a training has so few steps that it learns nothing, in the words of plan and of train."""

SMALLER_STEPS = "lower microBatchSize and gradientAccumulationSteps"
MORE_ROWS = "add records, raise epochs, or lower prepare.contextLength"


def few_steps(steps: int, examples: int, per_step: int, noun: str) -> str | None:
    """Return a warning if a step takes more than all examples, or is the only step; None otherwise.

    `noun` names an example: a row or a pair.
    """
    if steps > 1 and per_step <= examples:
        return None
    count = f"{steps:,} steps in all"
    if steps == 1:
        count = "1 step in all"
    if per_step == 1:
        return f"{count}: the data has 1 {noun}; {MORE_ROWS}"
    return f"{count}: a step takes {per_step:,} {noun}s, and the data has {examples:,}; {SMALLER_STEPS}"
