"""`finetune run --detach`: goes on in a process of its own, which outlives the terminal."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from finetune_cli.diagnostics import UsageError
from finetune_cli.exit_codes import FAILED
from finetune_operator.errors import ClusterError

PRIVATE = 0o600


def run_in_background(work: Callable[[], int], log: Path) -> int:
    """Do the work in a copy of this process, whose output goes to `log`, and return the process's id.

    A copy and no new process: it keeps the lock of the work folder, so that no other command can come in between.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    code = FAILED
    try:
        _leave_terminal(log)
        code = work()
    except (UsageError, ClusterError, OSError) as error:
        print(f"finetune: {error}", file=sys.stderr)
    except BaseException:  # noqa: BLE001  the copy must never go on with the caller's work
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Without the exit handlers of the caller, which belong to the original process.
        os._exit(code)


def _leave_terminal(log: Path) -> None:
    """Start a session of its own, and write all output to the log."""
    os.setsid()
    with log.open("wb") as output, Path(os.devnull).open("rb") as nothing:
        log.chmod(PRIVATE)
        os.dup2(nothing.fileno(), sys.stdin.fileno())
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
