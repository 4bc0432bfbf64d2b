"""Columns that say whether a record is to be learned: the label of KTO, and switches of other tools."""

import re
from collections.abc import Iterable

from finetune_trainer.data.records.records import Fields, InvalidRecord, shortened
from finetune_trainer.data.records.unrendered import is_label

SWITCHES = frozenset({"train", "weight", "loss", "keep", "desirable", "is_desirable"})
"""Columns with which other tools take a whole record out of the loss."""
SKIPS = frozenset({"skip", "exclude", "excluded"})
"""Columns whose true value does the same."""
TEMPLATE_ARGUMENTS = frozenset({"chat_template_kwargs", "reasoning_effort"})
"""Columns with arguments of the chat template for a single record."""
MEDIA = frozenset({"image", "images", "audio", "audios", "video", "videos"})
"""Columns of what is no text, and which a text may refer to with <image>."""
TURN_SWITCHES = frozenset(
    {
        "mask_history",
        "last_turn_only",
        "train_on_last_turn",
        "train_on_input",
        "train_on_inputs",
        "train_on_prompt",
    }
)
"""Columns whose true value says that other turns are learned than all of the assistant."""
MASKS = frozenset(
    {
        *(
            "assistant_mask",
            "assistant_masks",
            "completion_mask",
            "labels",
            "loss_mask",
        ),
        *("mask", "masks", "train_mask", "weights"),
    }
)
"""Columns whose list says which turns or tokens are learned."""
LEARNING = re.compile(
    r"(?:^|_)(?:exclude|ignore|keep|learn|loss|mask|skip|supervis|train|weight)",
    re.IGNORECASE,
)
"""A part of a name that speaks of learning, as in `loss_indices` and `is_masked`."""
JUDGEMENTS = frozenset(
    {
        *("accepted", "approved", "correct", "feedback", "good", "grade", "is_correct"),
        *("is_good", "is_valid", "label", "preference", "quality", "quality_score"),
        *("rating", "reward", "score", "scores", "stars", "valid", "verified", "votes"),
    }
)
"""Columns with a judgement of a record, which may say that it is not to be learned."""
DECISIONS = SWITCHES | SKIPS | TURN_SWITCHES | MASKS | TEMPLATE_ARGUMENTS | MEDIA
"""Columns that decide how a record is learned."""


OFF = frozenset(
    {
        *("0", "0.0", "-1", "bad", "dislike", "f", "fail", "failed", "false"),
        *("incorrect", "n", "negative", "no", "rejected", "thumbs_down"),
        *("undesirable", "wrong"),
    }
)
"""Labels of answers that are to be avoided. pandas writes False into CSV."""
ON = frozenset(
    {
        *("1", "1.0", "accepted", "chosen", "correct", "desirable", "good", "like"),
        *("pass", "passed", "positive", "right", "t", "thumbs_up", "true", "y", "yes"),
    }
)
"""Labels of answers that are to be learned."""


def decide(columns: Iterable[str]) -> frozenset[str]:
    """Return the columns, among these, that decide how a record is learned."""
    return frozenset(
        column
        for column in columns
        if str(column).lower() in DECISIONS or LEARNING.search(str(column))
    )


def check_label(record: Fields, column: str) -> None:
    """Raise InvalidRecord if a record of KTO is labelled as an answer to avoid, or if its label is a text."""
    label = record.get(column)
    if isinstance(label, str) and not is_label(label):
        raise InvalidRecord(
            f"{column} must be true or false, it is a text: leave it out with columns: {{ignored: [{column}]}}"
        )
    check_avoided(record, column)


def check_avoided(record: Fields, column: str) -> None:
    """Raise InvalidRecord if a column says that the answer of a record is to be avoided."""
    label = record.get(column)
    if _is_off(label):
        raise InvalidRecord(
            f"{column} is {shortened(str(label)).lower()}, so the answer is to be avoided, and SFT would learn it: "
            f"remove the record, or leave the column out with columns: {{ignored: [{column}]}}"
        )


def is_unknown_label(label: object) -> bool:
    """Return whether a label says neither that an answer is to be learned nor that it is to be avoided."""
    if label is None or label == "" or _is_off(label):
        return False
    return str(label).strip().lower() not in ON


def check_is_learned(record: Fields, decisions: Iterable[str]) -> None:
    """Raise InvalidRecord if a column takes a whole record out of the loss, or asks for another rendering."""
    for column in decisions:
        value = record.get(column)
        name = str(column).lower()
        if name in MEDIA and value:
            raise InvalidRecord(
                f"{column}: only text is trained on: remove the record, "
                f"or leave the column out with columns: {{ignored: [{column}]}}"
            )
        if name in TEMPLATE_ARGUMENTS and value:
            raise InvalidRecord(
                f"{column} of a single record is not used: set prepare.chatTemplateArguments for all records, "
                f"or leave it out with columns: {{ignored: [{column}]}}"
            )
        if name in MASKS or name not in DECISIONS:
            _check_no_mask(column, value)
        elif name in TURN_SWITCHES:
            _check_turns(column, value)
        elif _is_on(value) if name in SKIPS else _is_off(value):
            raise InvalidRecord(
                f"{column} is {shortened(str(value))}, so the record is not to be learned: remove it"
            )
        # A column `loss` may be a measured loss.
        if name == "weight" and _is_fraction(value):
            raise InvalidRecord(
                f"weight is {shortened(str(value))}, but no record counts more than another: "
                "leave it out with columns: {ignored: [weight]}"
            )


def _check_no_mask(column: str, value: object) -> None:
    if isinstance(value, list) and any(isinstance(item, int | float) for item in value):
        raise InvalidRecord(
            f"{column} is a list that is not used: write train: false into each message that is not to be learned, "
            f"or leave the column out with columns: {{ignored: [{column}]}}"
        )


def _check_turns(column: str, value: object) -> None:
    if _is_on(value):
        raise InvalidRecord(
            f"{column} is {shortened(str(value)).lower()}, but all turns of the assistant are learned, and no other: "
            "write train: false into a message that is not to be learned, "
            f"or leave the column out with columns: {{ignored: [{column}]}}"
        )


def _is_fraction(value: object) -> bool:
    """Return whether a weight is another number than 1."""
    try:
        return isinstance(value, int | float | str) and float(value) != 1
    except ValueError:
        return False


def _is_on(value: object) -> bool:
    if isinstance(value, str):
        return value.strip().lower() in {"true", "1", "yes"}
    return isinstance(value, bool | int | float) and value > 0


def _is_off(value: object) -> bool:
    if isinstance(value, str):
        return value.strip().lower() in OFF
    return isinstance(value, bool | int | float) and value <= 0
