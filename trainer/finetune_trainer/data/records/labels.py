"""Columns that say whether a record is to be learned: the label of KTO, and switches of other tools."""

from collections.abc import Iterable

from finetune_trainer.data.records.records import Fields, InvalidRecord, shortened
from finetune_trainer.data.records.unrendered import is_label

SWITCHES = frozenset({"train", "weight", "loss"})
"""Columns with which other tools take a whole record out of the loss."""


def check_label(record: Fields, column: str) -> None:
    """Raise InvalidRecord if a record of KTO is labelled as an answer to avoid, or if its label is a text."""
    label = record.get(column)
    if isinstance(label, str) and not is_label(label):
        raise InvalidRecord(
            f"{column} must be true or false, it is a text: leave it out with columns: {{ignored: [{column}]}}"
        )
    if _is_off(label):
        raise InvalidRecord(
            f"{column} is false, so the answer is to be avoided, and SFT would learn it: remove the record"
        )


def check_is_learned(record: Fields, switches: Iterable[str]) -> None:
    """Raise InvalidRecord if a column takes a whole record out of the loss."""
    for column in switches:
        value = record.get(column)
        if _is_off(value):
            raise InvalidRecord(
                f"{column} is {shortened(str(value))}, so the record is not to be learned: remove it"
            )


def _is_off(value: object) -> bool:
    if isinstance(value, str):
        # pandas writes False into CSV.
        return value.strip().lower() in {"false", "0"}
    return isinstance(value, bool | int | float) and not value
