"""A process that imports torch once and forks a stage for every request; forkserver.py starts it.

It reads a JSON object a line from stdin and writes a line for each. For a stage to start that is the child's pid. For
`{"wait": PID}` it is the exit code, once the child has ended.
"""

import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers.integrations.sdpa_attention
import transformers.models.auto.tokenization_auto
import transformers.models.llama.modeling_llama  # noqa: F401  transformers loads it lazily

import finetune_trainer.stages.prepare  # so that no child imports them
import finetune_trainer.stages.push
import finetune_trainer.stages.train  # noqa: F401
from finetune_trainer.data.encoding import Encoder, TextExample
from finetune_trainer.data.packing import Document
from finetune_trainer.runtime import artifacts
from finetune_trainer.runtime.entrypoint import main
from finetune_trainer.stop_signal import stop


def serve() -> None:
    """Answer every request until stdin is closed."""
    stop.install()  # before any child exists: the real program installs it before its imports
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if not pid:
            run(request)
        print(pid, flush=True)


def run(request: dict[str, Any]) -> None:
    """Run the stage in this child and exit with its code."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(request["variables"])
    if "slow_disk" in request:
        slow_fsync(request["slow_disk"])
    if "largest_file" in request:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(request["largest_file"]),) * 2)
    if "tokenized" in request:
        log_tokenized_texts(Path(request["tokenized"]))
    for name, value in request.get("constants", {}).items():
        module, _, constant = name.rpartition(".")
        setattr(importlib.import_module(module), constant, value)
    if not request.get("exchange", True):
        artifacts._exchange = lambda _one, _other: False
    if "slow_rename" in request:
        slow_rename(request["slow_rename"])
    if "moves" in request:
        record_moves(Path(request["moves"]))
    code = main([request["stage"]])
    sys.stdout.flush()
    os._exit(code)


def log_tokenized_texts(path: Path) -> None:
    """Append every text to a file, one a line, before it is tokenized."""
    encode = Encoder.encode

    def logged(self: Encoder, examples: list[TextExample]) -> Iterator[Document]:
        with path.open("a") as file:
            file.writelines(f"{example.text}\n" for example in examples)
        return encode(self, examples)

    Encoder.encode = logged  # type: ignore[method-assign]


def slow_rename(seconds: float) -> None:
    """Wait that long after every rename and every exchange of a folder."""
    for owner, name in ((Path, "rename"), (artifacts, "_exchange")):
        setattr(owner, name, followed_by_sleep(getattr(owner, name), seconds))


def followed_by_sleep(function: Callable[[Any, Path], Any], seconds: float) -> Callable[[Any, Path], Any]:
    def slow(one: Any, other: Path) -> Any:
        returned = function(one, other)
        time.sleep(seconds)
        return returned

    return slow


def record_moves(file: Path) -> None:
    """Append a line to the file when this process begins to replace a folder, and when it has done so."""
    move = artifacts.move_into_place

    def record(moment: str) -> None:
        with file.open("a") as lines:
            lines.write(f"{moment} {os.getpid()}\n")

    def recorded(temporary: Path, folder: Path) -> None:
        record("begin")
        move(temporary, folder)
        record("end")

    artifacts.move_into_place = recorded


def slow_fsync(seconds: float) -> None:
    """Make every fsync take that many seconds longer."""
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(seconds)
        fsync(descriptor)

    os.fsync = slow


if __name__ == "__main__":
    serve()
