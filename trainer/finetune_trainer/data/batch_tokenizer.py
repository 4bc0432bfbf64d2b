"""Tokenize batches in this process, and where there are enough of them, in several others.

What becomes of a batch depends neither on the number of processes nor on which of them has it. Only the shape of a
data set's records depends on earlier ones: until it is known, this process tokenizes.
"""

from collections.abc import Callable
from typing import Any

from finetune_trainer.contract import PrepareConfig
from finetune_trainer.data.batch_messages import records_message, settings_message
from finetune_trainer.data.documents import Counts
from finetune_trainer.data.record_batches import Batch
from finetune_trainer.data.record_tokenizer import (
    RecordTokenizer,
    TokenizedBatch,
    TokenizerSettings,
)
from finetune_trainer.data.worker_pool import WorkerPool
from finetune_trainer.runtime.processors import memory_limit, own_memory, usable_processors

POOL_CHARACTERS = 16 * 2**20
"""Other processes are started behind so many characters, so that a small data set does not wait for their imports."""
MAX_PROCESSES = 8
"""One process cannot read and pack for many more."""
PROCESS_BYTES = 400 * 2**20
"""Memory that a process may take, by a guess: measured were 86 MB with 4,096 tokens and 204 MB with 128,000."""
BATCHES_AHEAD = 2
"""Batches for each process that wait, are tokenized, or are not yet packed."""


def process_count() -> int:
    """Return how many processes may tokenize at the same time: as many as there are processors and memory for."""
    allowed, limit = min(usable_processors(), MAX_PROCESSES), memory_limit()
    return (
        allowed if limit is None else max(1, min(allowed, (limit - own_memory()) // PROCESS_BYTES))
    )


class BatchTokenizer:
    """Tokenizes batches that are given in order; `counts` has the shape of the records before the first one."""

    def __init__(self, tokenizer: Any, config: PrepareConfig, counts: Counts) -> None:
        self._tokenizer, self._config = tokenizer, config
        self._own = RecordTokenizer(tokenizer, config.recipe, config.objective)
        self._dataset, self._shape = counts.dataset, counts.shape
        self._characters = 0
        self._processes = process_count()
        self._pool: WorkerPool | None = None

    @property
    def ahead(self) -> int:
        """Return how many batches may be submitted before the first of them is needed."""
        return BATCHES_AHEAD * self._pool.size if self._pool and self._pool.is_ready else 0

    def submit(self, batch: Batch) -> Callable[[], TokenizedBatch]:
        """Begin with a batch; the function that is returned waits for the result.

        That function raises ServiceUnavailable if a process was killed.
        """
        if batch.records and batch.dataset != self._dataset:
            self._dataset, self._shape = batch.dataset, None
        shape, pool = self._shape, self._pool_for(batch)
        message = records_message(batch.fields, shape) if pool and shape else None
        if pool is None or message is None:
            tokenized = self._own.tokenize(batch.fields, shape)
            self._shape = tokenized.shape
            return lambda: tokenized
        future = pool.submit(message)
        return lambda: future.result() or self._own.tokenize(batch.fields, shape)

    def _pool_for(self, batch: Batch) -> WorkerPool | None:
        """Return the pool if it is ready; start it where there has been enough work."""
        self._characters += batch.characters
        if self._pool is None and self._processes > 1 and self._characters >= POOL_CHARACTERS:
            settings = TokenizerSettings.of(self._tokenizer)
            message = settings_message(settings, self._config.recipe, self._config.objective)
            self._pool = WorkerPool(self._processes, message)
        return self._pool if self._pool and self._pool.is_ready else None

    def close(self) -> None:
        """End all other processes."""
        if self._pool is not None:
            self._pool.close()
