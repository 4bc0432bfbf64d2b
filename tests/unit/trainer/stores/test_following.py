import errno
import os
import time
from unittest.mock import patch

import pytest
from support.stores.models import MIB, MemorySource, contents

from finetune_trainer.runtime.artifacts import digest_file
from finetune_trainer.runtime.errors import ServiceUnavailable
from finetune_trainer.stores import streaming_digest
from finetune_trainer.stores.download import fetch
from finetune_trainer.stores.streaming_digest import follow


def test_digest_of_a_growing_file_is_that_of_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming_digest, "FLUSH_BYTES", 1000)
    path = tmp_path / "part"
    path.write_bytes(b"before" * 1000)
    with follow(path) as followed, path.open("ab") as output:
        for _ in range(20):
            output.write(os.urandom(777))
            output.flush()
            time.sleep(0.001)
    assert followed.sha256() == digest_file(path)


def test_part_that_is_rewritten_meanwhile_is_read_again(tmp_path):
    source = MemorySource({"model": b"w" * MIB}, has_digests=True)

    def write_other_bytes(_name, path):
        path.write_bytes(b"x" * 5000)
        time.sleep(20 * streaming_digest.POLL_SECONDS)  # until they are read
        path.write_bytes(b"")

    source.before_write = write_other_bytes
    folder, _ = fetch(source, None, tmp_path)
    assert contents(folder) == source.files


def test_error_while_flushing_is_raised_before_the_rename(tmp_path):
    def fail(_descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source = MemorySource({"model": b"w" * 5000}, has_digests=True)
    with (
        patch("os.fsync", fail),
        pytest.raises(ServiceUnavailable, match="No space left on device"),
    ):
        fetch(source, None, tmp_path)
    assert not list(tmp_path.glob("*/files/model"))
    folder, _ = fetch(source, None, tmp_path)
    assert contents(folder) == source.files
