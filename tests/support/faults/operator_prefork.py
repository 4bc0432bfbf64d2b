"""A process that imports the operator once and forks an operator for every request; operators.py starts it.

fork_requests.py has the form of the requests.

The client libraries read KUBECONFIG when they are imported. It is therefore a relative path here, and each child
changes to a folder of its own.
"""

import os
import sys
from datetime import datetime, timedelta
from typing import Any

from support.trainer import fork_requests

import finetune_operator.__main__ as program


def run(request: dict[str, Any]) -> None:
    """Run the operator in this child and exit with its code."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(request["folder"])
    if request["clock"]:
        shift_clock(timedelta(seconds=request["clock"]))
    code = 1
    try:
        code = program.main(request["arguments"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def shift_clock(by: timedelta) -> None:
    """Make `datetime.now` of every module of the operator wrong by this time."""

    class ShiftedDatetime(datetime):
        """A datetime whose clock is wrong."""

        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            """Return the wrong time."""
            return datetime.now(tz) + by

    for name, module in list(sys.modules.items()):
        if (
            name.startswith("finetune_operator")
            and getattr(module, "datetime", None) is datetime
        ):
            module.datetime = ShiftedDatetime  # type: ignore[attr-defined]


if __name__ == "__main__":
    fork_requests.serve(run)
