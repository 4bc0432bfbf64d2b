"""Run one function of a trainer of bench/train.py; print its result and the peak memory of this process, in JSON.

    trainer_process.py MODULE:FUNCTION FOLDER OPTIONS

The process has no imports and no settings of PyTorch but the trainer's own. The peak is the kernel's VmHWM: ru_maxrss
would begin with the peak of the process that has started this one.
"""

import contextlib
import json
import logging
import os
import pkgutil
import sys
from argparse import Namespace
from pathlib import Path

from processes import memory_mib
from train_bench.benchmark import Benchmark

if __name__ == "__main__":
    logging.disable(logging.WARNING)
    _, function, folder, options = sys.argv
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        result = pkgutil.resolve_name(function)(
            Benchmark(Path(folder), Namespace(**json.loads(options)))
        )
    print(json.dumps({"result": result, "peak_mib": memory_mib(os.getpid(), "VmHWM")}))
