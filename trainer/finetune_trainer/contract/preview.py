"""What a preview of the data asks and answers: the records as the model will see them, and their counts."""

from pydantic import Field

from finetune_trainer.contract.configs import PrepareConfig
from finetune_trainer.contract.memory import MemoryEstimate
from finetune_trainer.contract.models import ContractModel


class PreviewRequest(ContractModel):
    """What to look at."""

    config: PrepareConfig
    examples: int = Field(default=0, ge=0)
    """Number of records to show."""
    records: bool = True
    """Whether the records are read."""
    memory: bool = False
    """Whether the memory of the training is estimated."""


class Segment(ContractModel):
    """Consecutive tokens of an example, as text."""

    text: str
    learned: bool
    """Whether the tokens are in the loss."""


class PreviewedExample(ContractModel):
    """A text that the model is trained on. A record of a preference has two: chosen and rejected."""

    file: str
    line: int
    segments: tuple[Segment, ...]
    """The text, special tokens included, as it is after truncation."""
    tokens: int
    learned_tokens: int
    truncated: bool = False
    """Whether the record is longer than prepare.contextLength."""


class PreviewCounts(ContractModel):
    """The counts that the result of prepare would have."""

    records: int
    invalid: int
    truncated: int
    dropped: int
    split: int
    unrendered: int
    unread_words: int = 0
    unused: int
    train_rows: int
    validation_rows: int
    train_tokens: int
    train_targets: int
    """Tokens of the rows for training that are in the loss."""
    unknown_fraction: float = 0.0
    """Fraction of all tokens for text that the tokenizer does not have."""


class PreviewProblem(ContractModel):
    """Why prepare would fail."""

    field: str
    """Field of the manifest, for example datasets[0].uri."""
    message: str
    exit_code: int


class PreviewReport(ContractModel):
    """What a preview has seen."""

    counts: PreviewCounts | None = None
    """Absent if the records could not be read."""
    is_sample: bool = False
    """Whether the counts are of the first records only, because the data is in a store."""
    problems: tuple[PreviewProblem, ...] = ()
    invalid_records: tuple[str, ...] = ()
    """The reasons why records are invalid, each with a place, or with their number and the first places."""
    notes: tuple[str, ...] = ()
    """The lines that prepare would log about the data."""
    not_looked_at: tuple[str, ...] = ()
    """Sources that were not read, each with the reason."""
    examples: tuple[PreviewedExample, ...] = ()
    memory: MemoryEstimate | None = None
    """The memory of the training; absent if it is not asked for, or not known."""
    memory_unknown: str = ""
    """Why the memory of the training is not known."""
