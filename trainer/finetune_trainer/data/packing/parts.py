"""The folder in which `prepare` works, part by part, so that a kill costs at most one part.

    rows/               the files of `data.row_format`; they become the stage's output
    part-00000.json     the state at the end of each part, written when the part's rows are durable

The next process continues after the last complete part. It needs the same inputs and the same records up to there.
"""

import shutil
from itertools import count
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from finetune_trainer.data.documents import Counts, Split
from finetune_trainer.data.packing.row_format import file_name, record_size
from finetune_trainer.data.packing.writer import SplitPart
from finetune_trainer.files import write_durably


class PartState(BaseModel):
    """The state at the end of a part."""

    model_config = ConfigDict(extra="forbid")

    inputs: str
    """Digest of everything that determines the rows, besides the records."""
    counts: Counts
    source_bytes: int
    """Bytes of the data sets read so far. Some of them belong to records of the next part."""
    source_digest: str
    """SHA-256 of these bytes."""
    rows: dict[Split, SplitPart]


class PartFolder:
    """The parts of one stage that are not yet its output."""

    def __init__(self, folder: Path, context_length: int, inputs: str) -> None:
        self.rows = folder / "rows"
        self.inputs = inputs
        self._folder = folder
        self._context_length = context_length

    def load(self, output: Path) -> list[PartState]:
        """Return the complete parts in order; delete all other files in the folder.

        If a process was killed after its rows became `output` and before it wrote its result, the rows are moved back.
        """
        # Output without a result is not verified yet. Moving it back makes this the ordinary case of a resume.
        if output.is_dir() and self._state_file(0).exists() and not self.rows.exists():
            output.rename(self.rows)
        states: list[PartState] = []
        for number in count():
            state = self._read(number)
            if state is None:
                break
            states.append(state)
        self._delete_all_but(states)
        return states

    def save(self, number: int, state: PartState) -> None:
        """Record a part as complete. Its rows must be durable: the next process does not write them again."""
        write_durably(
            self._state_file(number), state.model_dump_json(indent=1).encode()
        )

    def clear(self) -> None:
        """Delete all parts and create the empty folder."""
        self._delete_all_but([])

    def delete(self) -> None:
        """Delete the folder, when its rows are the output or are of no use."""
        # The last part first: if this is killed, the remaining parts still begin with the first part.
        for path in sorted(self._folder.glob("part-*.json"), reverse=True):
            path.unlink()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _state_file(self, number: int) -> Path:
        return self._folder / f"part-{number:05}.json"

    def _read(self, number: int) -> PartState | None:
        """Return a part's state; None if it is missing, has other inputs, or its files do not have their sizes."""
        try:
            state = PartState.model_validate_json(self._state_file(number).read_bytes())
            has_all_rows = self._has_all_rows(number, state)
        except (OSError, ValidationError):
            return None
        if not has_all_rows or state.inputs != self.inputs:
            return None
        return state

    def _has_all_rows(self, number: int, state: PartState) -> bool:
        # Sizes are enough: train verifies the checksum of each row when it reads it.
        row_size = record_size(self._context_length)
        return all(
            path.stat().st_size == state.rows[split].rows * row_size
            for split, path in self._row_files(number, state).items()
        )

    def _row_files(self, number: int, state: PartState) -> dict[Split, Path]:
        """Return the part's files by split; a split without rows has none."""
        return {
            split: self.rows / file_name(split, number)
            for split, part in state.rows.items()
            if part.rows
        }

    def _delete_all_but(self, states: list[PartState]) -> None:
        self.rows.mkdir(parents=True, exist_ok=True)
        kept = set()
        for number, state in enumerate(states):
            kept.add(self._state_file(number))
            kept.update(self._row_files(number, state).values())
        # Hidden files are what a killed process left of a state file that it was writing.
        for path in [
            *self._folder.glob("*.json"),
            *self._folder.glob(".*"),
            *self.rows.iterdir(),
        ]:
            if path not in kept:
                path.unlink()
