"""The folder in which `prepare` works, part by part, so that a killed process loses one part at most.

    rows/               the files of `data.row_format`; they become the stage's output
    part-00000.json     what was known at the end of each part, written when the part's rows are durable

A later process goes on behind the last complete part. It needs the same inputs and the same records up to there.
"""

import shutil
from itertools import count
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from finetune_trainer.data.documents import Counts, Split
from finetune_trainer.data.packing_writer import SplitPart
from finetune_trainer.data.row_format import file_name, record_size
from finetune_trainer.files import write_durably


class PartState(BaseModel):
    """The state at the end of a part."""

    model_config = ConfigDict(extra="forbid")

    inputs: str
    """Digest of all that determines the rows, besides the records."""
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
        self._folder, self._context_length = folder, context_length

    def load(self, output: Path) -> list[PartState]:
        """Return the complete parts in order; delete all other files in the folder.

        A process may have been killed when its rows were `output` already, and its result was not yet written. Then
        the rows are moved back.
        """
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
        """Record a part as complete. Its rows are on disk already."""
        write_durably(self._state_file(number), state.model_dump_json(indent=1).encode())

    def clear(self) -> None:
        """Delete all parts and create the empty folder."""
        self._delete_all_but([])

    def delete(self) -> None:
        """Delete the folder, when its rows are the output or are of no use.

        The last part is deleted first: where this is killed, the complete parts are still the first ones.
        """
        for path in sorted(self._folder.glob("part-*.json"), reverse=True):
            path.unlink()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _state_file(self, number: int) -> Path:
        return self._folder / f"part-{number:05}.json"

    def _read(self, number: int) -> PartState | None:
        """Return a part's state, or None if it is missing, has other inputs, or its files do not have their sizes."""
        try:
            state = PartState.model_validate_json(self._state_file(number).read_bytes())
            is_complete = all(
                (self.rows / file_name(split, number)).stat().st_size
                == part.rows * record_size(self._context_length)
                for split, part in state.rows.items()
                if part.rows
            )
        except (OSError, ValidationError):
            return None
        return state if is_complete and state.inputs == self.inputs else None

    def _delete_all_but(self, states: list[PartState]) -> None:
        self.rows.mkdir(parents=True, exist_ok=True)
        kept = {self._state_file(number) for number in range(len(states))} | {
            self.rows / file_name(split, number)
            for number, state in enumerate(states)
            for split, part in state.rows.items()
            if part.rows
        }
        for path in [*self._folder.glob("*.json"), *self._folder.glob(".*"), *self.rows.iterdir()]:
            if path not in kept:
                path.unlink()
