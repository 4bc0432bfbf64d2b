"""The process that imports torch once and forks for every run; its owner is forkserver.py."""

import json
import os
import resource
import sys
import time
from typing import Any

import torch
import transformers.integrations.sdpa_attention
import transformers.models.llama.modeling_llama  # noqa: F401  loaded by transformers only when it is needed

import finetune_trainer.stages.train  # noqa: F401  imported here so that the children need not
from finetune_trainer.runtime.entrypoint import main
from finetune_trainer.stop_signal import stop


def serve() -> None:
    stop.install()  # before a child could be killed, as the program does before its imports
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
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(request["variables"])
    if "slow_disk" in request:
        slow_down(request["slow_disk"])
    if "largest_file" in request:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(request["largest_file"]),) * 2)
    code = main(["train"])
    sys.stdout.flush()
    os._exit(code)


def slow_down(seconds: float) -> None:
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(seconds)
        fsync(descriptor)

    os.fsync = slow


if __name__ == "__main__":
    serve()
