"""If two threads end the process, the first of them writes its last file whole."""

import subprocess
import sys
from pathlib import Path

import pytest

from finetune_trainer import stop_signal
from finetune_trainer.contract import ExitCode

TWO_THREADS = f"""
import sys, threading, time
from pathlib import Path

sys.path.insert(0, {str(Path(stop_signal.__file__).parents[1])!r})
from finetune_trainer.stop_signal import StopSignal

stop = StopSignal()
message = Path(sys.argv[1])
first = sys.argv[2]
empty = threading.Event()

def write(text):
    with message.open("w") as file:
        is_first = not empty.is_set()
        empty.set()
        if is_first:  # else the other thread would have nothing to interrupt
            time.sleep(1)
        file.write(text)

stop.on_immediate_exit(lambda: write("stopped"))
other = threading.Thread(target=stop.request, daemon=True)
if first == "request":
    other.start()
    empty.wait()
    stop.claim_exit()
else:
    stop.claim_exit()
    threading.Thread(target=lambda: (empty.wait(), other.start()), daemon=True).start()
write("done")
"""
"""A program in which a thread writes its last file while another thread wants to end the process."""


@pytest.mark.parametrize(
    ("first", "text", "code"),
    [("request", "stopped", ExitCode.INTERRUPTED), ("claim", "done", 0)],
)
def test_last_file_is_that_of_the_thread_that_ends_first(tmp_path, first, text, code):
    message = tmp_path / "message"
    done = subprocess.run(
        [sys.executable, "-c", TWO_THREADS, message, first], check=False, timeout=30
    )
    assert (message.read_text(), done.returncode) == (text, code)


def test_signal_ends_a_process_that_has_claimed_its_exit():
    beginning, _, _ = TWO_THREADS.partition("stop.on_immediate_exit")
    program = beginning + (
        "import os, signal\nstop.install()\nstop.on_immediate_exit(lambda: message.write_text('stopped'))\n"
        "stop.claim_exit()\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "/dev/null", ""], check=False, timeout=30
    )
    assert done.returncode == ExitCode.INTERRUPTED
