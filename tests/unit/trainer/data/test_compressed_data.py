"""Compressed data sets: the rows of the plain file, streamed, and damage that is named."""

import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from support.trainer.formats import FORMATS
from support.trainer.models import prompt_records
from support.trainer.prepared import prepare, prepare_again, prepare_config
from support.trainer.stages import run_to_failure

from finetune_trainer.contract import Environment, ExitCode
from finetune_trainer.data.reading.formats import read_records
from finetune_trainer.data.reading.source_file import SourceFile
from finetune_trainer.runtime.artifacts import digest_file


def zstd(content: bytes) -> bytes:
    """Return the content as two frames, as `zstd` writes files that were joined."""
    half = len(content) // 2
    return b"".join(
        pa.compress(part, "zstd", asbytes=True)
        for part in (content[:half], content[half:])
    )


def gzipped(content: bytes) -> bytes:
    """Return the content as two members, as joined files have them."""
    half = len(content) // 2
    return gzip.compress(content[:half]) + gzip.compress(content[half:])


COMPRESS: dict[str, Callable[[bytes], bytes]] = {".gz": gzipped, ".zst": zstd}


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("extension", ["jsonl", "json", "csv"])
def test_compressed_file_gives_the_same_rows(
    *,
    tokenizer_folder: Path,
    environment: Environment,
    manifest_dir: Path,
    compression: str,
    extension: str,
) -> None:
    plain = manifest_dir / f"data.{extension}"
    packed = manifest_dir / f"data.{extension}{compression}"
    FORMATS[extension](plain, prompt_records(300))
    packed.write_bytes(COMPRESS[compression](plain.read_bytes()))
    expected = prepare(prepare_config(tokenizer_folder, plain.name), environment)
    result = prepare_again(prepare_config(tokenizer_folder, packed.name), environment)

    assert result.digest == expected.digest
    assert result.data_digest == f"sha256:{digest_file(packed)}"


@pytest.mark.parametrize("compression", COMPRESS)
def test_truncated_compressed_file_is_refused(
    tokenizer_folder: Path,
    environment: Environment,
    manifest_dir: Path,
    compression: str,
) -> None:
    content = COMPRESS[compression](
        b"".join(json.dumps(row).encode() + b"\n" for row in prompt_records(300))
    )
    (manifest_dir / f"data.jsonl{compression}").write_bytes(content[:-20])

    message, code = run_to_failure(
        prepare_config(tokenizer_folder, f"data.jsonl{compression}"), environment
    )
    assert code == ExitCode.DATA
    assert f"data.jsonl{compression}: not " in message
    assert "or damaged: Truncated compressed stream" in message


@pytest.mark.parametrize("compression", COMPRESS)
def test_compressed_file_is_streamed(tmp_path: Path, compression: str) -> None:
    """Neither Python nor Arrow holds the content, which is many times larger than the file."""
    path = tmp_path / f"data.jsonl{compression}"
    content = b"".join(
        json.dumps({"text": f"{number} " + "the file " * 500}).encode() + b"\n"
        for number in range(5000)
    )
    path.write_bytes(COMPRESS[compression](content))
    arrow_before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        peaks = [
            pa.total_allocated_bytes() - arrow_before
            for _ in read_records(SourceFile(path), "JSONLines")
        ]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(peaks) == 5000
    assert len(content) > 20_000_000
    assert peak < 1_500_000
    assert max(peaks) < 4_000_000
