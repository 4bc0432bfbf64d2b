"""What the benchmarks of training share: packed rows, the times of steps and of calls, and how results are printed."""

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from finetune_trainer.contract import Environment
from finetune_trainer.data.documents import Document
from finetune_trainer.data.packing.writer import PackedWriter
from finetune_trainer.runtime import artifacts
from finetune_trainer.runtime.progress.progress import ProgressReporter


def make_rows(
    workspace: Path,
    count: int,
    target_fraction: float,
    *,
    context: int,
    vocabulary: int,
) -> Path:
    """Write full rows of two documents each; the last `target_fraction` of each document is in the loss."""
    random = np.random.Generator(np.random.Philox(1))
    loss_mask = (
        np.arange(context // 2) >= context // 2 * (1 - target_fraction)
    ).astype("u1")
    loss_mask[0] = 0
    output = workspace / "prepare" / "rows" / "output"
    with artifacts.atomic_folder(output) as folder:
        with PackedWriter(folder, context, 0) as writer:
            for _ in range(2 * count):
                tokens = random.integers(2, vocabulary, context // 2, dtype="<i4")
                writer.add("train", Document(tokens, loss_mask))
        artifacts.seal(folder, known_digests=writer.digests())
    return output


def make_pairs(
    workspace: Path,
    count: int,
    target_fraction: float,
    *,
    context: int,
    vocabulary: int,
) -> Path:
    """Write pairs of full rows with the same prompt; the last `target_fraction` of each row is the completion."""
    random = np.random.Generator(np.random.Philox(1))
    loss_mask = (np.arange(context) >= context * (1 - target_fraction)).astype("u1")
    output = workspace / "prepare" / "rows" / "output"
    with artifacts.atomic_folder(output) as folder:
        with PackedWriter(folder, context, 0, pairs=True) as writer:
            for _ in range(count):
                prompt = random.integers(2, vocabulary, context, dtype="<i4")
                for _ in range(2):
                    tokens = np.where(
                        loss_mask,
                        random.integers(2, vocabulary, context, dtype="<i4"),
                        prompt,
                    )
                    writer.add("train", Document(tokens.astype("<i4"), loss_mask))
        artifacts.seal(folder, known_digests=writer.digests())
    return output


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class StepTimes(ProgressReporter):
    """Records the time at the end of each step of our loop."""

    def __init__(self, environment: Environment, clock: str) -> None:
        super().__init__("train", environment)
        self.clock = clock
        self.ends: list[float] = []
        self.start_step: object = None
        """The step that the run began with: not 0 if it was resumed."""

    @override
    def update(self, **fields: object) -> None:
        """Report the progress as training does, and record the time if a step has ended."""
        super().update(**fields)
        self.start_step = fields.get("start_step", self.start_step)
        if "loss" in fields:
            self.ends.append(CLOCKS[self.clock]())


class Pause(NamedTuple):
    """A call during which training waits, in seconds of the wall clock."""

    start: float
    seconds: float


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Replace an attribute while the context is open."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def timed(owner: Any, name: str, pauses: list[Pause]) -> Iterator[None]:
    """Append every call of a method or function to `pauses` while the context is open."""
    original = getattr(owner, name)

    def wrapped(*arguments: object, **named: object) -> object:
        start = time.perf_counter()
        try:
            return original(*arguments, **named)
        finally:
            pauses.append(Pause(start, time.perf_counter() - start))

    with replaced(owner, name, wrapped):
        yield


@contextlib.contextmanager
def recorded(owner: Any, name: str, values: list[Any]) -> Iterator[None]:
    """Append what each call of a function returns while the context is open."""
    original = getattr(owner, name)

    def call(*arguments: object) -> object:
        values.append(original(*arguments))
        return values[-1]

    with replaced(owner, name, call):
        yield


def steps_by_pause(ends: list[float], pauses: list[Pause]) -> dict[bool, list[float]]:
    """Return the durations of the steps that a pause is a part of, and of the others; `ends` are of the wall clock."""
    steps: dict[bool, list[float]] = {False: [], True: []}
    for before, end in itertools.pairwise(ends):
        steps[any(before <= pause.start < end for pause in pauses)].append(end - before)
    return steps


def spread(values: list[float], form: str) -> str:
    """Return median, minimum and maximum."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def longer(steps: dict[bool, list[float]]) -> str:
    """Return how much longer steps with a checkpoint are than those without, by their medians."""
    if not all(steps.values()):
        return "not measured: there are too few steps"
    with_one, without = (statistics.median(steps[has_one]) for has_one in (True, False))
    return f"by {1e3 * (with_one - without):.1f} ms, to {1e3 * with_one:.1f} from {1e3 * without:.1f}"


def milliseconds(seconds: list[float]) -> str:
    """Return median, minimum and maximum in milliseconds."""
    return (
        f"{spread([1e3 * second for second in seconds], '.1f')} ms"
        if seconds
        else "none"
    )
