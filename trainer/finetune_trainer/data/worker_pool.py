"""Processes that tokenize, each with a thread that sends it batches and waits for its answers.

They are new processes, no forks: libraries have started threads by now. They end when this process does, however it
ends: the kernel kills them, and their pipes close.
"""

import contextlib
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from signal import Signals
from threading import Event

from finetune_trainer.data import worker
from finetune_trainer.data.batch_messages import read_batch, receive, send
from finetune_trainer.data.record_tokenizer import TokenizedBatch
from finetune_trainer.runtime.child_process import start_module
from finetune_trainer.runtime.errors import ServiceUnavailable

ONE_THREAD = {
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""Variables of a process: there is one for each processor already."""

Process = subprocess.Popen[bytes]


class WorkerPool:
    """A fixed number of processes that tokenize."""

    def __init__(self, size: int, settings: bytes) -> None:
        """Start the processes; `settings` is their first message. Call this in the main thread: they end with it."""
        self.size = size
        self._ready = Event()
        self._free: SimpleQueue[Process] = SimpleQueue()
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="tokenizing")
        self._processes = [
            start_module(worker.__name__, variables=ONE_THREAD, pipes=subprocess.PIPE)
            for _ in range(size)
        ]
        for process in self._processes:
            self._threads.submit(self._greet, process, settings)

    @property
    def is_ready(self) -> bool:
        """Return whether a process has finished its imports, or failed to."""
        return self._ready.is_set()

    def submit(self, records: bytes) -> "Future[TokenizedBatch | None]":
        """Tokenize the batch of a message; the result is None if the process met an error in its records.

        The future raises ServiceUnavailable if the process ends.
        """
        return self._threads.submit(self._exchange, records)

    def close(self) -> None:
        """End all processes, also those that are at work."""
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(
                        BrokenPipeError
                    ):  # what was not sent to a process that was killed
                        pipe.close()

    def _greet(self, process: Process, settings: bytes) -> None:
        try:
            _ask(process, settings)
        finally:  # where it has ended, the first batch will say so
            self._free.put(process)
            self._ready.set()

    def _exchange(self, records: bytes) -> TokenizedBatch | None:
        process = self._free.get()  # at once: there are as many threads as processes
        try:
            answer = _ask(process, records)
        finally:
            self._free.put(process)
        return None if answer == worker.FAILED else read_batch(answer)


def _ask(process: Process, message: bytes) -> bytes:
    """Return the answer to a message; raise ServiceUnavailable if the process has ended."""
    assert process.stdin  # noqa: S101  it was started with pipes
    assert process.stdout  # noqa: S101
    try:
        send(process.stdin, message)
        answer = receive(process.stdout)
    except OSError:  # a broken pipe
        answer = None
    if answer is None:
        raise ServiceUnavailable(_why_ended(process))
    return answer


def _why_ended(process: Process) -> str:
    code = process.wait()
    if code < 0:
        return (
            f"a process that tokenizes was killed by {Signals(-code).name}: the container may be out of memory: "
            "raise prepare.pod.resources.limits.memory, or lower limits.cpu, so that there are fewer processes"
        )
    return f"a process that tokenizes ended with exit code {code}: the lines before this one may say why"
