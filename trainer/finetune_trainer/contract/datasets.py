"""Data sets: the URIs of the records, the columns that are read, and how often each record is used."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from finetune_trainer.contract.models import ContractModel
from finetune_trainer.contract.recipes import Revision
from finetune_trainer.contract.uris import DataUri

DataFormat = Literal["Auto", "JSONLines", "JSON", "CSV", "Parquet"]
ColumnName = Annotated[str, StringConstraints(min_length=1, max_length=256)]
ColumnText = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
"""A column's name, or a template with several columns."""
ConfigName = Annotated[
    str, StringConstraints(min_length=1, max_length=256, pattern=r"^\S+$")
]
SplitName = Annotated[
    str,
    StringConstraints(
        min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
    ),
]


class Columns(ContractModel):
    """Names of the data set's columns, for records whose fields have other names than the trainer's.

    A dot in a name leads into an object if the data set has no column of that name. A value with double braces is a
    Jinja template, whose variables are the columns of a record; messages and tools have names only.
    """

    messages: ColumnName | None = None
    """Column with the messages of a conversation; absent: messages."""

    tools: ColumnName | None = None
    """Column with the function schemas of the tools that a conversation may call; absent: tools."""

    system: ColumnText | None = None
    """Column with the system message of a conversation, or a template of it; absent: system."""

    instruction: ColumnText | None = None
    """Column with the question of a conversation with a single answer, or a template of it; absent: instruction."""

    input: ColumnText | None = None
    """Column with more of this question, which follows it after a blank line; absent: input."""

    output: ColumnText | None = None
    """Column with the answer to this question, or a template of it; absent: output."""

    prompt: ColumnText | None = None
    """Column with the prompt of a completion, or of a pair, or a template of it; absent: prompt."""

    completion: ColumnText | None = None
    """Column with the completion, or a template of it; absent: completion."""

    text: ColumnText | None = None
    """Column with the text, or a template of it; absent: text."""

    chosen: ColumnText | None = None
    """Column with the preferred completion of a pair, as text or messages, or a template of it; absent: chosen."""

    rejected: ColumnText | None = None
    """Column with the other completion of a pair, or a template of it; absent: rejected."""

    ignored: tuple[ColumnName, ...] = Field(default=(), max_length=64)
    """Columns with a text that is left out on purpose, also in part by a template. A text in any other column that is
    not read makes the record invalid."""

    def named(self) -> dict[str, str]:
        """Return the columns and templates of fields, by the names of the fields."""
        named: dict[str, str] = self.model_dump(exclude_none=True, exclude={"ignored"})
        return named


class DataSource(ContractModel):
    """Fields that data sets and the validation set have in common."""

    uri: DataUri | None = None

    revision: Revision | None = None
    """Commit or tag of the hub repository. For other sources any text; change it when the content has changed."""

    config: ConfigName | None = None
    """Configuration of a hub data set without a path. Absent: its only configuration, or default."""

    split: SplitName | None = None
    """Split of a hub data set without a path. Absent: its only split; several splits are an error."""

    format: DataFormat = "Auto"
    """Format of the files; Auto derives it from the file name extension, to which .gz or .zst may be added."""

    columns: Columns | None = None
    """Names of the columns with the records' fields. Absent: the columns have the names of the fields."""


class DatasetSource(DataSource):
    """A data set: records in JSON Lines, JSON, CSV or Parquet files."""

    uri: DataUri
    """hf://ORG/NAME[/PATH], s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH, oci://HOST/REPOSITORY[:TAG],
    https://HOST/FILE or pvc://CLAIM/PATH; in a local run also file:///PATH or a path relative to the manifest.
    The last segment of a path may be a pattern, such as train-*.jsonl: all its files are read, sorted by name."""

    # A larger weight uses the records of a smaller weight and more, so a sample grows instead of being drawn anew.
    weight: float = Field(default=1.0, gt=0, le=100)
    """How often each record is used. 0.3 uses a random sample of 30 %, and 2 uses each record twice. 2.5 uses each
    record twice and a random half of the records a third time. The seed determines the samples. Validation records are
    never repeated."""


class Validation(DataSource):
    """Records to measure the validation loss: a fraction of each data set, or a data set of their own."""

    fraction: float | None = Field(default=None, ge=0, le=0.5)
    """Fraction of each data set's records that is held out; the seed determines the records."""

    uri: DataUri | None = None
    """Data set to validate with, instead of a fraction. Written as the URI of a data set."""

    def dataset(self) -> DatasetSource | None:
        """Return the data set to validate with, or None if a fraction is held out."""
        if not self.uri:
            return None
        return DatasetSource(**self.model_dump(exclude={"fraction"}))
