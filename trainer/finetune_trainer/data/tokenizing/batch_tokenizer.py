"""Tokenize batches in this process, and if there are enough of them, in several others.

The outcome of a batch depends neither on the number of processes nor on the process that tokenizes it. Only the shape
of a data set's records depends on earlier records: until it is known, this process tokenizes.
"""

from collections.abc import Callable
from typing import Any

from finetune_trainer.contract import PrepareConfig
from finetune_trainer.data.documents import Counts
from finetune_trainer.data.reading.record_batches import RecordBatch
from finetune_trainer.data.tokenizing.messages import records_message, settings_message
from finetune_trainer.data.tokenizing.record_tokenizer import (
    RecordTokenizer,
    TokenizedBatch,
    TokenizerSettings,
)
from finetune_trainer.data.tokenizing.worker_pool import WorkerPool
from finetune_trainer.runtime.machine.processors import (
    memory_limit,
    own_memory,
    usable_processors,
)

POOL_CHARACTERS = 16 * 2**20
"""Other processes are started after so many characters, so that a small data set does not wait for their imports."""
MAX_PROCESSES = 8
"""The process that reads and packs cannot keep many more of them busy."""
# A guess with a margin: measured were 86 MB with a vocabulary of 4,096 tokens and 204 MB with 128,000 tokens.
PROCESS_BYTES = 400 * 2**20
"""Memory that a process may take."""
# When a process has finished a batch, its next batch is there already.
BATCHES_AHEAD = 2
"""Batches for each process that wait, are tokenized, or are not yet packed."""


def process_count() -> int:
    """Return the number of processes that may tokenize at the same time, for which there are processors and memory."""
    allowed = min(usable_processors(), MAX_PROCESSES)
    limit = memory_limit()
    if limit is None:
        return allowed
    fitting = (limit - own_memory()) // PROCESS_BYTES
    return max(1, min(allowed, fitting))


class BatchTokenizer:
    """Tokenizes batches in their order; `counts` has the shape of the records before the first batch."""

    def __init__(self, tokenizer: Any, config: PrepareConfig, counts: Counts) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._own = RecordTokenizer(tokenizer, config.recipe, config.objective)
        self._dataset = counts.dataset
        self._shape = counts.shape
        self._characters = 0
        self._processes = process_count()
        self._pool: WorkerPool | None = None

    @property
    def ahead(self) -> int:
        """The number of batches that may be submitted before the first of them is needed."""
        pool = self._ready_pool()
        return BATCHES_AHEAD * pool.size if pool else 0

    def submit(self, batch: RecordBatch) -> Callable[[], TokenizedBatch]:
        """Begin with a batch; the function that is returned waits for the result.

        That function raises ServiceUnavailable if a process was killed.
        """
        if batch.records and batch.dataset != self._dataset:
            # Each data set has a shape of its own.
            self._dataset = batch.dataset
            self._shape = None
        shape = self._shape
        pool = self._pool_for(batch)
        message = records_message(batch.fields, shape) if pool and shape else None
        if pool is None or message is None:
            tokenized = self._own.tokenize(batch.fields, shape)
            self._shape = tokenized.shape
            return lambda: tokenized
        future = pool.submit(message)

        def result() -> TokenizedBatch:
            # None: the process met an error. This process meets it, too, and then reports it with its traceback.
            return future.result() or self._own.tokenize(batch.fields, shape)

        return result

    def _pool_for(self, batch: RecordBatch) -> WorkerPool | None:
        """Return the pool if it is ready; start it after POOL_CHARACTERS."""
        self._characters += batch.characters
        is_worth_it = self._processes > 1 and self._characters >= POOL_CHARACTERS
        if self._pool is None and is_worth_it:
            settings = TokenizerSettings.of(self._tokenizer)
            message = settings_message(
                settings, self._config.recipe, self._config.objective
            )
            self._pool = WorkerPool(self._processes, message)
        return self._ready_pool()

    def _ready_pool(self) -> WorkerPool | None:
        # While the processes import their libraries, this process goes on alone.
        if self._pool is not None and self._pool.is_ready:
            return self._pool
        return None

    def close(self) -> None:
        """End all other processes."""
        if self._pool is not None:
            self._pool.close()
