"""A process that imports torch once and forks a stage for every request; forkserver.py starts it."""

import ctypes
import errno
import fcntl
import importlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
import transformers.integrations.sdpa_attention
import transformers.models.auto.tokenization_auto
import transformers.models.llama.modeling_llama  # noqa: F401  transformers loads it lazily
from support.trainer import fork_requests
from support.trainer.forked_ranks import fork_ranks

import finetune_trainer.stages.prepare  # so that no child imports them
import finetune_trainer.stages.push
import finetune_trainer.stages.train  # noqa: F401
from finetune_trainer.data.tokenizing import batch_tokenizer
from finetune_trainer.data.tokenizing.encoder import (
    EncodedExample,
    Encoder,
    TextExample,
)
from finetune_trainer.data.tokenizing.worker_pool import WorkerPool
from finetune_trainer.runtime import artifacts
from finetune_trainer.runtime.entrypoint import main
from finetune_trainer.stop_signal import stop


def serve() -> None:
    """Answer every request until stdin is closed; fork_requests.py has their form."""
    stop.install()  # before any child exists: the real program installs it before its imports
    torch.set_num_threads(1)
    for module in sys.argv[1:]:
        importlib.import_module(module)
    fork_requests.serve(run)


def run(request: dict[str, Any]) -> None:
    """Run the stage in this child and exit with its code."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(request["variables"])
    # PyTorch replaces its pool of threads after a fork, and two threads that find the old pool at once end the process.
    torch.set_num_threads(1)
    for option, set_option in OPTIONS.items():
        if option in request:
            set_option(request[option])
    code = main([request["stage"]])
    sys.stdout.flush()
    os._exit(code)


def set_constants(constants: dict[str, Any]) -> None:
    """Set module constants by their full names."""
    for name, value in constants.items():
        module, _, constant = name.rpartition(".")
        setattr(importlib.import_module(module), constant, value)


def log_tokenized_texts(path: Path) -> None:
    """Append every text to a file, one a line, before it is tokenized."""
    encode = Encoder.encode

    def logged(self: Encoder, examples: list[TextExample]) -> Iterator[EncodedExample]:
        with path.open("a") as file:
            file.writelines(f"{example.text}\n" for example in examples)
        return encode(self, examples)

    Encoder.encode = logged


def tokenize_in(processes: int) -> None:
    """Tokenize in that many processes from the first batch whose shape is known; wait for them to start."""
    name = f"{batch_tokenizer.__name__}.usable_processors"
    set_constants({name: lambda: processes})
    batch_tokenizer.POOL_CHARACTERS = 0
    WorkerPool.is_ready = property(lambda pool: pool._ready.wait())  # type: ignore[assignment]  # a property in place of a method


def slow_names(seconds: float) -> None:
    """Wait that long after every rename, every new link and every exchange of a folder."""
    for owner, name in (
        *((Path, name) for name in ("rename", "replace", "symlink_to", "hardlink_to")),
        (artifacts, "exchange"),
    ):
        setattr(owner, name, followed_by_sleep(getattr(owner, name), seconds))


def followed_by_sleep(
    function: Callable[[Any, Path], Any], seconds: float
) -> Callable[[Any, Path], Any]:
    def slow(argument: Any, other: Path) -> Any:
        returned = function(argument, other)
        time.sleep(seconds)
        return returned

    return slow


def freeze_before(name: str, number: int) -> None:
    """Stop this process before the call of a function that has this number, counted from 1."""
    module, _, function = name.rpartition(".")
    owner = importlib.import_module(module)
    calls = count(1)
    original = getattr(owner, function)

    def frozen(*args: Any, **options: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(*args, **options)

    setattr(owner, function, frozen)


def before_call(name: str, number: int, act: Callable[[], object]) -> None:
    """Act before each call of a function from this number on, counted from 1."""
    module, _, function = name.rpartition(".")
    owner = importlib.import_module(module)
    calls = count(1)
    original = getattr(owner, function)

    def delayed(*args: Any, **options: Any) -> Any:
        if next(calls) >= number:
            act()
        return original(*args, **options)

    setattr(owner, function, delayed)


def wait_for_ever() -> None:
    """Wait as a lost collective does: other threads go on."""
    threading.Event().wait()


def hold_python() -> None:
    """Wait in C with Python's lock, so that no other thread of Python goes on."""
    ctypes.PyDLL(None).pause()


def no_locks(_descriptor: int, _operation: int) -> None:
    """Raise the error of a file system without locks."""
    raise OSError(errno.ENOLCK, "No locks available")


def remove_locks(exist: bool) -> None:  # noqa: FBT001  a request's value
    """Remove the locks of the file system, unless they are to exist."""
    if not exist:
        fcntl.flock = no_locks  # type: ignore[assignment]  # a file system without locks


def remove_exchange(exists: bool) -> None:  # noqa: FBT001  a request's value
    """Remove the exchange of two names, unless it is to exist."""
    if not exists:
        name = f"{artifacts.__name__}.exchange"
        set_constants({name: lambda _first, _second: False})


def slow_fsync(seconds: float) -> None:
    """Make every fsync take that many seconds longer."""
    fsync = os.fsync

    def slow(descriptor: Any) -> None:
        time.sleep(seconds)
        fsync(descriptor)

    os.fsync = slow  # type: ignore[assignment]  # its parameter has another name


OPTIONS: dict[str, Callable[[Any], None]] = {
    "slow_disk": slow_fsync,
    "largest_file": lambda size: resource.setrlimit(
        resource.RLIMIT_FSIZE, (size, size)
    ),
    "tokenized": lambda path: log_tokenized_texts(Path(path)),
    "constants": set_constants,
    "processes": tokenize_in,
    "hang": lambda call: before_call(call[0], call[1], wait_for_ever),
    "hang_in_c": lambda call: before_call(call[0], call[1], hold_python),
    "slow": lambda call: before_call(call[0], 1, lambda: time.sleep(call[1])),
    "ranks": fork_ranks,  # after the constants, which then hold for all ranks
    "freeze": lambda call: freeze_before(*call),
    "locks": remove_locks,
    "exchange": remove_exchange,
    "slow_names": slow_names,
}
"""What a request may set before the stage runs, in this order; `ForkServer.start` says what each does."""


if __name__ == "__main__":
    serve()
