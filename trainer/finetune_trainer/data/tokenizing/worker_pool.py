"""Processes that tokenize, each with a thread that sends it batches and waits for its answers.

They are new processes and no forks, because libraries have started threads by now. They end when this process ends, in
any way: the kernel kills them, and their pipes close.
"""

import contextlib
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from signal import Signals
from threading import Event

from finetune_trainer.data.tokenizing import worker
from finetune_trainer.data.tokenizing.messages import read_batch, receive, send
from finetune_trainer.data.tokenizing.record_tokenizer import TokenizedBatch
from finetune_trainer.runtime.child_process import start_module
from finetune_trainer.runtime.errors import ServiceUnavailable

# There is a process for each processor already.
ONE_THREAD = {
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""Environment variables of a process that tokenizes."""

Process = subprocess.Popen[bytes]


class WorkerPool:
    """A fixed number of processes that tokenize."""

    def __init__(self, size: int, settings: bytes) -> None:
        """Start the processes; `settings` is their first message. Call this in the main thread.

        The kernel kills a child when the thread that started it ends.
        """
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
        """Whether a process has finished its imports, or has failed."""
        return self._ready.is_set()

    def submit(self, records: bytes) -> "Future[TokenizedBatch | None]":
        """Tokenize the batch of a message; the result is None if the process met an error in its records.

        The future raises ServiceUnavailable if the process ends.
        """
        return self._threads.submit(self._exchange, records)

    def close(self) -> None:
        """End all processes, also processes that are at work."""
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    # Closing a pipe flushes bytes that were not sent to the process before it was killed.
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    def _greet(self, process: Process, settings: bytes) -> None:
        try:
            _ask(process, settings)
        finally:
            # Also if the process has ended: then the first batch raises ServiceUnavailable.
            self._free.put(process)
            self._ready.set()

    def _exchange(self, records: bytes) -> TokenizedBatch | None:
        # This does not wait: there are as many threads as processes.
        process = self._free.get()
        try:
            answer = _ask(process, records)
        finally:
            self._free.put(process)
        if answer == worker.FAILED:
            return None
        return read_batch(answer)


def _ask(process: Process, message: bytes) -> bytes:
    """Return the answer to a message; raise ServiceUnavailable if the process has ended."""
    assert process.stdin  # noqa: S101  it was started with pipes
    assert process.stdout  # noqa: S101
    try:
        send(process.stdin, message)
        answer = receive(process.stdout)
    except OSError:
        # A broken pipe.
        answer = None
    if answer is None:
        raise ServiceUnavailable(_cause_of_end(process))
    return answer


def _cause_of_end(process: Process) -> str:
    code = process.wait()
    if code < 0:
        return (
            f"a process that tokenizes was killed by {Signals(-code).name}: the container may be out of memory: "
            "raise prepare.pod.resources.limits.memory, or lower limits.cpu, so that there are fewer processes"
        )
    return f"a process that tokenizes ended with exit code {code}: the lines before this line may say why"
