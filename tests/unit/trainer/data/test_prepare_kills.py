"""Prepare that is killed at random moments: it continues after its last complete part and ends in the same bytes."""

import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from support.trainer.forkserver import ForkServer
from support.trainer.models import write_jsonl
from support.trainer.prepare_parts import (
    RECORDS,
    SEVERAL,
    SMALL,
    complete_records,
    output_bytes,
    records,
    state_folder,
    write_several,
)
from support.trainer.prepared import prepare_config
from support.trainer.stages import environment_in, read_termination_message

from finetune_trainer.contract import ExitCode, PrepareConfig, PrepareResult


class Attempts:
    """Attempts of the stage as real processes, in a workspace of their own."""

    def __init__(self, server: ForkServer, config: PrepareConfig, folder: Path) -> None:
        self.environment = environment_in(folder)
        self._server = server
        self._folder = folder
        self._config = config
        self.tokenized: list[list[int]] = []
        """The numbers of the records that each attempt tokenized."""
        self.complete_before: list[int] = []
        """The records in complete parts when each attempt began."""

    def start(self) -> Any:
        self.complete_before.append(complete_records(self.environment))
        tokenized = self._folder / "tokenized"
        tokenized.unlink(missing_ok=True)
        constants = {
            f"finetune_trainer.data.{name}": value for name, value in SMALL.items()
        }
        return self._server.start(
            self._config,
            self.environment,
            self._folder / "log",
            constants=constants,
            tokenized=str(tokenized),
        )

    def wait(self, process: Any) -> int:
        code = process.wait()
        numbers = re.findall(r"^\D*(\d+)", "\n".join(self.lines()), re.MULTILINE)
        self.tokenized.append([int(number) for number in numbers])
        return code

    def lines(self) -> list[str]:
        """Return the texts that the newest attempt has tokenized."""
        log = self._folder / "tokenized"
        return log.read_text().splitlines() if log.exists() else []

    def result(self) -> PrepareResult:
        result = read_termination_message(self.environment).result
        assert isinstance(result, PrepareResult)
        return result


@pytest.mark.parametrize("datasets", [None, SEVERAL], ids=["one", "several"])
def test_random_kills_change_neither_bytes_nor_result(
    fork_server: ForkServer,
    tokenizer_folder: Path,
    tmp_path: Path,
    datasets: list[dict[str, Any]] | None,
) -> None:
    config = prepare_config(
        tokenizer_folder,
        datasets=datasets,
        validation_fraction=0.2,
        max_invalid_fraction=0.5,
    )
    once = Attempts(fork_server, config, tmp_path / "once")
    killed = Attempts(fork_server, config, tmp_path / "killed")
    for attempts in (once, killed):
        assert attempts.environment.manifest_dir
        write_jsonl(attempts.environment.manifest_dir / "data.jsonl", records())
        write_several(attempts.environment.manifest_dir)
    assert once.wait(once.start()) == ExitCode.DONE

    moments = random.Random(7)
    code = None
    kills = 0
    while code != ExitCode.DONE:
        process = killed.start()
        # The last attempts are not killed, so that an attempt begins with complete parts and ends.
        if kills < 8 and killed.complete_before[-1] < RECORDS * 0.8:
            most = moments.randrange(RECORDS // 3)
            process.until(lambda most=most: len(killed.lines()) > most)
            process.kill(signal.SIGKILL)
            kills += 1
        code = killed.wait(process)

    assert kills >= 2
    assert killed.complete_before[-1] > 0
    for first, tokenized in zip(killed.complete_before, killed.tokenized, strict=True):
        assert min(tokenized, default=first) >= first
    assert len(killed.tokenized[-1]) < RECORDS * 0.9
    assert output_bytes(killed.environment) == output_bytes(once.environment)
    assert killed.result() == once.result()
    result = once.result()
    assert result.records == RECORDS
    assert result.invalid == (268 if datasets else RECORDS // 10)
    assert not state_folder(killed.environment).exists()
