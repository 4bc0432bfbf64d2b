"""What the processes besides the first have in place of the checkpoint manager."""

from collections.abc import Callable
from pathlib import Path

from finetune_trainer.runtime.artifacts import CorruptArtifact
from finetune_trainer.runtime.errors import ServiceUnavailable
from finetune_trainer.training.checkpoint_format import Layout, Snapshot, read_files
from finetune_trainer.training.checkpoint_manager import folder_of
from finetune_trainer.training.ranks import Ranks


class CheckpointReader:
    """Reads the checkpoint that the first process has verified. Writes none: the first one's is that of all."""

    saved_step: int | None = None

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self._folder, self._ranks = folder, ranks

    def load_latest(self, layout: Layout) -> Snapshot | None:
        """Return the checkpoint that the first process has loaded, or None; the processes wait for each other.

        Raise ServiceUnavailable if this process cannot read it.
        """
        (step,) = self._ranks.sum(0)
        if not step:
            return None
        folder = folder_of(self._folder, int(step))
        try:
            return read_files(folder, layout)
        except CorruptArtifact as error:
            raise ServiceUnavailable(
                f"checkpoint {folder.name}, which the first process has verified, cannot be read by another one: "
                f"check that all nodes see the same files in spec.workspace: {error}"
            ) from error

    def should_save(self, _step: int) -> bool:
        """Return False."""
        return False

    def save(self, snapshot: Snapshot) -> None:
        """Write nothing."""

    def finish_write(self) -> None:
        """Return that no step is durable by this process."""

    def save_blocking(self, _step: int, _snapshot: Callable[[], Snapshot]) -> None:
        """Write nothing; return that no step is durable by this process."""
