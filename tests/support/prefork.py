"""A process that imports torch once and forks a stage for every request; forkserver.py starts it.

It reads a JSON object a line from stdin. For each it writes two lines: the child's pid, then its exit code.
"""

import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers.integrations.sdpa_attention
import transformers.models.llama.modeling_llama  # noqa: F401  transformers loads it lazily

import finetune_trainer.stages.prepare  # so that no child imports it
import finetune_trainer.stages.train  # noqa: F401
from finetune_trainer.data.encoding import Encoder, TextExample
from finetune_trainer.data.packing import Document
from finetune_trainer.runtime.entrypoint import main
from finetune_trainer.stop_signal import stop


def serve() -> None:
    """Fork for every request until stdin is closed."""
    stop.install()  # before any child exists: the real program installs it before its imports
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if not pid:
            run(request)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


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


def slow_fsync(seconds: float) -> None:
    """Make every fsync take that many seconds longer."""
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(seconds)
        fsync(descriptor)

    os.fsync = slow


if __name__ == "__main__":
    serve()
