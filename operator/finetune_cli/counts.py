"""Counts for `finetune plan`: records, rows, tokens and steps, as far as they are known before anything runs."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from finetune_cli.fields import Workload, sources, workload
from finetune_operator.api.spec import PipelineSpec
from finetune_trainer.contract import Environment, PrepareResult
from finetune_trainer.contract.environment import InvalidLocation

MAX_BYTES = 1 << 30
"""Larger files are not counted: a plan should take seconds."""
EXPANSION = 10
"""Records are at most about so many times as large as their gzip file."""
UNREADABLE = (OSError, ValueError, RecursionError, EOFError, zlib.error, csv.Error)
"""What reading a file raises that is missing, damaged or of another format."""
NOT_COUNTED = "records not counted"


def count_lines(
    spec: PipelineSpec, prepared: PrepareResult | None, environment: Environment | None
) -> list[str]:
    """Return what is known of data and steps: by the result of prepare, else by the files on this machine."""
    work = workload(spec)
    together = list(_processes_lines(work, environment))
    if prepared:
        return [
            _data_line(prepared, work),
            _steps_line(work, work.steps(prepared.train_rows)),
            *together,
        ]
    data = [f"data: {text}" for text in _records(spec, environment)]
    if work.epochs is None:
        return [*data, _steps_line(work, work.max_steps or 0), *together]
    unknown = "rows, tokens and steps: known when prepare is done (`finetune run --until prepare`)"
    return [*data, unknown, *together]


def _processes_lines(work: Workload, environment: Environment | None) -> Iterator[str]:
    """Yield how many processes train together, and where, if there are several."""
    if work.processes > 1:
        nodes = f"on {_count(work.nodes, 'node')}" if environment is None else "on this machine"
        rows = f"a step has {_count(work.examples_per_step, work.example)}"
        yield f"train: {work.processes} processes {nodes}, {rows}"


def _data_line(result: PrepareResult, work: Workload) -> str:
    left_out = ", ".join(
        f"{count:,} {name}"
        for name, count in (
            ("invalid", result.invalid),
            ("truncated", result.truncated),
            ("dropped", result.dropped),
        )
        if count
    )
    validation = (
        f" and {work.examples(result.validation_rows):,} for validation"
        if result.validation_rows
        else ""
    )
    length = f"{'rows of ' if work.pairs else ''}{work.context_length:,} tokens"
    records = f"data: {_count(result.records, 'record')}" + (f" ({left_out})" if left_out else "")
    rows = f"{_count(work.examples(result.train_rows), work.example)} of {length}{validation}"
    return f"{records}, {rows}, {_count(result.train_tokens, 'token')} to train on"


def _steps_line(work: Workload, steps: int) -> str:
    passes = f", {_count(work.epochs, 'epoch')}" if work.epochs is not None else ""
    return (
        f"train: {_count(steps, 'step')} of {_count(work.examples_per_step, work.example)}{passes}"
    )


def _count(number: float, noun: str) -> str:
    return f"{number:,.10g} {noun}" + ("" if number == 1 else "s")


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
    compressed = path.suffix == ".gz"
    limit = MAX_BYTES // EXPANSION if compressed else MAX_BYTES
    if path.stat().st_size > limit:
        raise ValueError(f"larger than {limit >> 20:,} MiB")
    with gzip.open(path) if compressed else path.open("rb") as content:
        return _count_in(
            content, path.suffixes[-2:-1][0] if compressed and path.suffixes[:-1] else path.suffix
        )


def _count_in(content: BinaryIO | gzip.GzipFile, suffix: str) -> int:
    match suffix:
        case ".jsonl" | ".ndjson":
            return sum(1 for line in content if line.strip())
        case ".csv":
            csv.field_size_limit(MAX_BYTES)
            rows = csv.reader(io.TextIOWrapper(content, "utf-8-sig", newline=""))
            return max(0, sum(1 for row in rows if row) - 1)
        case ".json":
            records = json.load(content)
            if isinstance(records, list):
                return len(records)
            raise ValueError("no list of records")
        case _:
            raise ValueError(f"only the trainer reads {suffix or 'this format'}")
