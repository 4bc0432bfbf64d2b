"""Proposes settings for a manifest from the model and the data on this machine."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_cli.checks.sample import Sample
from finetune_cli.checks.trainer_process import ask

DEFAULT_CONTEXT = 1024
SHORTEST_CONTEXT = 256
LONGEST_CONTEXT = 131_072
PERCENTILE = 0.99
"""Fraction of the records that are not truncated."""
# A chat template writes a few tokens around each turn, and each record has an end.
TOKENS_PER_TURN = 8
# Without a tokenizer: English text has four, code three, other scripts fewer.
CHARACTERS_PER_TOKEN = 2
LEAST_STEPS = 20
"""Steps below which a smaller batch is proposed."""
BATCHES = ((4, 4), (4, 1), (1, 1))
"""microBatchSize and gradientAccumulationSteps, the largest first."""
VALIDATION_FRACTION = 0.05
# Each record is drawn by itself: of ten expected, at least one is held out but for one seed in 20,000.
HELD_OUT_RECORDS = 10
"""Records that should be held out of small data."""
LARGEST_FRACTION = 0.5
# Not all architectures use the first name: GPT-2 has n_positions, MPT has max_seq_len.
POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")


@dataclass(frozen=True)
class Proposal:
    """Settings that suit the model and the data."""

    context_length: int = DEFAULT_CONTEXT
    micro_batch_size: int = 4
    gradient_accumulation_steps: int = 4
    validation_fraction: float = VALIDATION_FRACTION


@dataclass(frozen=True)
class BaseAnswer:
    """What the trainer knows about a base model on this machine."""

    problem: str | None = None
    """The reason why it cannot be trained, with the fix."""
    packs: bool = True
    """Whether documents of a packed row stay apart in it."""


def look_at_base(uri: str, folder: Path | None) -> BaseAnswer:
    """Return what the trainer knows; nothing is known if the model or the trainer is not on this machine."""
    if folder is None:
        return BaseAnswer()
    request = {"uri": uri, "folder": str(folder)}
    answers = ask("finetune_trainer.training.base_check", request, os.environ)
    if not answers:
        return BaseAnswer()
    problem = answers[-1]["problem"]
    if problem is not None:
        problem = str(problem).removeprefix("model ").removeprefix(f"{uri}: ")
    return BaseAnswer(problem, bool(answers[-1]["packs"]))


def propose(model: Path | None, sample: Sample | None) -> Proposal:
    """Return settings for a model's folder and a sample of the records; None for what is not on this machine."""
    positions = None
    if model is not None:
        positions = _positions(model)
    lengths = None
    if sample is not None and sample.records:
        lengths = _lengths(model, sample)
    context_length = DEFAULT_CONTEXT
    if lengths:
        longest = sorted(lengths)[math.ceil(PERCENTILE * len(lengths)) - 1]
        context_length = _rounded(longest)
    if positions:
        context_length = min(context_length, positions)
    if not lengths:
        return Proposal(context_length)
    tokens = sum(min(length, context_length) for length in lengths)
    rows = math.ceil(tokens / context_length)
    for batch in BATCHES:
        micro, accumulated = batch
        if rows >= LEAST_STEPS * micro * accumulated:
            break
    return Proposal(context_length, *batch, _validation_fraction(len(lengths)))


def _validation_fraction(records: int) -> float:
    """Return the fraction to hold out, so that a gate has some records to measure, also of small data."""
    wanted = math.ceil(100 * HELD_OUT_RECORDS / records) / 100
    return min(LARGEST_FRACTION, max(VALIDATION_FRACTION, wanted))


def _positions(model: Path) -> int | None:
    """Return the positions that the model supports by its config.json; None if it names none."""
    try:
        config = json.loads((model / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    # A model that also reads images has the settings of its language model there.
    text = config.get("text_config")
    if not isinstance(text, dict):
        text = config
    for key in POSITION_KEYS:
        value = text.get(key)
        if isinstance(value, int) and value >= 1:
            return value
    return None


def _lengths(model: Path | None, sample: Sample) -> list[int]:
    """Return the tokens of each record: counted by the model's tokenizer if it is here, else estimated."""
    turns = [_turns(record) for record in sample.records]
    texts = sample.texts
    counts = None
    if model is not None and (model / "tokenizer.json").is_file():
        request = {"tokenizer": str(model / "tokenizer.json"), "texts": texts}
        counts = ask("finetune_trainer.data.lengths", request, os.environ)
    if counts is None:
        counts = [
            {"tokens": math.ceil(len(text) / CHARACTERS_PER_TOKEN)} for text in texts
        ]
    return [
        int(count["tokens"]) + TOKENS_PER_TURN * turn
        for count, turn in zip(counts, turns, strict=True)
    ]


def _turns(record: dict[str, Any]) -> int:
    for value in record.values():
        if isinstance(value, list):
            return len(value)
    return 1


def _rounded(length: int) -> int:
    """Return the smallest power of two that is not below a length, within the limits of contextLength."""
    power = 1 << max(0, length - 1).bit_length()
    return max(SHORTEST_CONTEXT, min(LONGEST_CONTEXT, power))
