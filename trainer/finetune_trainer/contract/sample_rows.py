"""The rows of samples.jsonl in the folder of train: the trainer writes them, the command line reads them, too."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

SAMPLES = "samples.jsonl"
LOG_PREFIX = "sample "
"""Start of a log line that holds a row, for readers that cannot read the file."""


@dataclass(frozen=True)
class SampleRow:
    """The text that the model generated from a prompt, before the first step or at a validation."""

    step: int
    """Finished optimizer steps; 0 before training."""
    prompt: str
    text: str

    def to_json(self) -> str:
        """Return the row as a line without its end."""
        return json.dumps(asdict(self), ensure_ascii=False)


def read_samples(path: Path) -> list[SampleRow]:
    """Return the rows of a file, each step and prompt once; none if there is no file."""
    try:
        return parse_samples(path.read_text("utf-8", errors="replace").split("\n"))
    except OSError:
        return []


def parse_samples(lines: Iterable[str]) -> list[SampleRow]:
    """Return the rows in these lines, by ascending step. Lines that are no row are left out: a kill may tear a line."""
    rows: dict[tuple[int, str], SampleRow] = {}
    for line in lines:
        try:
            fields = json.loads(line)
            row = SampleRow(
                int(fields["step"]), str(fields["prompt"]), str(fields["text"])
            )
        except (ValueError, TypeError, KeyError):
            continue
        # The first row stays: a step that is repeated after an interruption generates the same text again.
        rows.setdefault((row.step, row.prompt), row)
    return sorted(rows.values(), key=lambda row: row.step)
