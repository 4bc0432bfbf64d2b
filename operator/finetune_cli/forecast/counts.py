"""Counts for `finetune plan`: records, rows, tokens and steps, as far as they are known before anything runs."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from finetune_cli.forecast.few_steps import few_steps_line
from finetune_cli.manifest.fields import Workload, sources, workload
from finetune_operator.api.spec import PipelineSpec
from finetune_trainer.contract import Environment
from finetune_trainer.contract.environment import InvalidLocation

# A plan should take seconds, so larger files are not counted.
MAX_BYTES = 1 << 30
"""Largest file that is counted."""
EXPANSION = 10
"""Records are at most about so many times as large as their gzip file."""
# About a million tokens a second and four characters a token: larger data would take minutes.
PREVIEWED_BYTES = 64 << 20
"""Largest data that is read as prepare reads it."""
UNREADABLE = (OSError, ValueError, RecursionError, EOFError, zlib.error, csv.Error)
"""What reading a file raises that is missing, damaged or of another format."""
NOT_COUNTED = "records not counted"


class DataCounts(Protocol):
    """Counts of records, rows and tokens: the result of prepare, or a preview of it."""

    @property
    def records(self) -> int: ...  # noqa: D102  as in PrepareResult
    @property
    def invalid(self) -> int: ...  # noqa: D102
    @property
    def truncated(self) -> int: ...  # noqa: D102
    @property
    def dropped(self) -> int: ...  # noqa: D102
    @property
    def split(self) -> int: ...  # noqa: D102
    @property
    def unrendered(self) -> int: ...  # noqa: D102
    @property
    def unread_words(self) -> int: ...  # noqa: D102
    @property
    def train_rows(self) -> int: ...  # noqa: D102
    @property
    def validation_rows(self) -> int: ...  # noqa: D102
    @property
    def train_tokens(self) -> int: ...  # noqa: D102
    @property
    def train_targets(self) -> int | None: ...  # noqa: D102
    @property
    def unknown_fraction(self) -> float: ...  # noqa: D102


def count_lines(
    spec: PipelineSpec, prepared: DataCounts | None, environment: Environment | None
) -> list[str]:
    """Return what is known of data and steps: by the counts of prepare, else by the files on this machine.

    `environment` is None for a plan on a cluster, whose files cannot be read from here.
    """
    work = workload(spec)
    processes = list(_processes_lines(work, environment))
    if prepared:
        steps = work.steps(prepared.train_rows)
        lines = [_data_line(prepared, work), _steps_line(work, steps), *processes]
        warning = few_steps_line(spec, prepared.train_rows)
        if warning:
            lines.append(warning)
        return lines
    data = [f"data: {text}" for text in _records(spec, environment)]
    if work.epochs is None:
        # maxSteps alone decides, so the number of steps is known without the rows.
        return [*data, _steps_line(work, work.max_steps or 0), *processes]
    unknown = "rows, tokens and steps: known when prepare is done (`finetune run --until prepare`)"
    return [*data, unknown, *processes]


def unknown_text(fraction: float) -> str:
    """Return how many of the tokens stand for text that the tokenizer does not have, in percent."""
    return f"{100 * fraction:.3g} % of the tokens unknown to the tokenizer"


def is_model_here(spec: PipelineSpec, environment: Environment) -> bool:
    """Return whether the base model is a folder of this machine."""
    try:
        return environment.locate(spec.model.uri).is_dir()
    except InvalidLocation:
        return False


def is_small(spec: PipelineSpec, environment: Environment) -> bool:
    """Return whether the model and all data are on this machine, and the data is small enough to read it for a plan."""
    size = 0
    for source in sources(spec):
        if source.kind not in {"model", "data"}:
            continue
        try:
            for uri in environment.matches(source.uri):
                path = environment.locate(uri)
                size += path.stat().st_size if source.kind == "data" else 0
        except (InvalidLocation, OSError):
            return False
    return size <= PREVIEWED_BYTES


def _processes_lines(work: Workload, environment: Environment | None) -> Iterator[str]:
    """Yield how many processes train together, and where, if there are several."""
    if work.processes == 1:
        return
    nodes = "on this machine"
    if environment is None:
        nodes = f"on {_count(work.nodes, 'node')}"
    rows = f"a step has {_count(work.examples_per_step, work.example)}"
    yield f"train: {work.processes} processes {nodes}, {rows}"


def _data_line(result: DataCounts, work: Workload) -> str:
    records = f"data: {_count(result.records, 'record')}"
    left_out = _left_out(result)
    if left_out:
        records += f" ({left_out})"
    length = f"{work.context_length:,} tokens"
    if work.pairs:
        length = f"rows of {length}"
    examples = f"{_count(work.examples(result.train_rows), work.example)} of {length}"
    if result.validation_rows:
        examples += f" and {work.examples(result.validation_rows):,} for validation"
    tokens = f"{_count(result.train_tokens, 'token')} to train on"
    if result.train_targets is not None:
        tokens += f", {result.train_targets:,} of them learned"
    if result.unknown_fraction:
        tokens += f", {unknown_text(result.unknown_fraction)}"
    return f"{records}, {examples}, {tokens}"


def _left_out(result: DataCounts) -> str:
    """Return how many records prepare has not used as they are, by reason."""
    counts = {
        "invalid": result.invalid,
        "truncated": result.truncated,
        "dropped": result.dropped,
        "split": result.split,
        "not rendered in full": result.unrendered,
        "with a word in a column that is not read": result.unread_words,
    }
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


def _steps_line(work: Workload, steps: int) -> str:
    step_size = _count(work.examples_per_step, work.example)
    line = f"train: {_count(steps, 'step')} of {step_size}"
    if work.epochs is not None:
        line += f", {_count(work.epochs, 'epoch')}"
    return line


def _count(number: float, noun: str) -> str:
    # Ten digits: an epoch may be a fraction, and counts must not turn into 1e+06.
    text = f"{number:,.10g} {noun}"
    if number == 1:
        return text
    return f"{text}s"


def _records(spec: PipelineSpec, environment: Environment | None) -> Iterator[str]:
    for source in sources(spec):
        if source.kind != "data":
            continue
        if environment is None:
            yield f"{NOT_COUNTED}: {source.uri} is read on the cluster"
            continue
        try:
            paths = [environment.locate(uri) for uri in environment.matches(source.uri)]
            yield f"{_count(sum(map(count_records, paths)), 'record')} in {source.uri}"
        except InvalidLocation:
            yield f"{NOT_COUNTED}: {source.uri} is not on this machine"
        except UNREADABLE as error:
            yield f"{NOT_COUNTED}: {source.uri}: {_reason(error)}"


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "its JSON is nested too deeply"
    return getattr(error, "strerror", None) or str(error)


def count_records(path: Path) -> int:
    """Return the number of records in a JSON Lines, JSON or CSV file, which may be compressed with gzip.

    Raises ValueError for other formats and large files, and one of UNREADABLE for a file that is not what its name
    says.
    """
    suffix = path.suffix
    if suffix != ".gz":
        _check_size(path, MAX_BYTES)
        with path.open("rb") as content:
            return _count_in(content, suffix)
    _check_size(path, MAX_BYTES // EXPANSION)
    inner = path.with_suffix("").suffix
    with gzip.open(path) as compressed:
        return _count_in(compressed, inner or suffix)


def _check_size(path: Path, limit: int) -> None:
    if path.stat().st_size > limit:
        raise ValueError(f"larger than {limit >> 20:,} MiB")


def _count_in(content: BinaryIO | gzip.GzipFile, suffix: str) -> int:
    match suffix:
        case ".jsonl" | ".ndjson":
            return sum(1 for line in content if line.strip())
        case ".csv":
            # The default limit of 128 KiB a field is less than a long text.
            csv.field_size_limit(MAX_BYTES)
            rows = csv.reader(io.TextIOWrapper(content, "utf-8-sig", newline=""))
            rows_with_cells = sum(1 for row in rows if row)
            # The first row holds the names of the columns.
            return max(0, rows_with_cells - 1)
        case ".json":
            records = json.load(content)
            if isinstance(records, list):
                return len(records)
            raise ValueError("no list of records")
        case _:
            raise ValueError(f"only the trainer reads {suffix or 'this format'}")
