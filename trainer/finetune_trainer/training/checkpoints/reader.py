"""What the processes besides the first have in place of the checkpoint manager."""

from collections.abc import Callable
from pathlib import Path

from finetune_trainer.training.checkpoints.format import Layout, Snapshot, open_files
from finetune_trainer.training.checkpoints.manager import folder_of
from finetune_trainer.training.distributed.ranks import Ranks


class CheckpointReader:
    """Reads the checkpoint that the first process has verified. The first process writes for all."""

    saved_step: int | None = None

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self._folder = folder
        self._ranks = ranks

    def load_latest(self, layout: Layout) -> Snapshot | None:
        """Return the checkpoint that the first process has loaded, or None; the processes wait for each other.

        Its tensors are read one at a time: all processes of a pod share its memory. Raise CorruptArtifact if this
        process cannot read it.
        """
        # The first process adds the step that it has verified, or 0. The others add nothing, and so wait for it.
        (step,) = self._ranks.sum(0)
        if not step:
            return None
        return open_files(folder_of(self._folder, int(step)), layout)

    def lacks(self, _step: int) -> bool:
        """Return False."""
        return False

    def should_save(self, _step: int) -> bool:
        """Return False."""
        return False

    def save(self, snapshot: Snapshot) -> None:
        """Write nothing."""

    def finish_write(self) -> None:
        """Return that no step is durable by this process."""

    def save_blocking(
        self, _step: int, _snapshot: Callable[[], Snapshot] | None
    ) -> None:
        """Write nothing; return that no step is durable by this process."""
