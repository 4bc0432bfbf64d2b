"""Other people's programs, asked for an answer; their own words when there is none."""

from __future__ import annotations

import subprocess

from testcluster.errors import TimedOut


def run_command(*command: str, called: str = "", given: str = "", timeout: float = 60) -> str:
    """Run a command and give its output. Raises NotReady, with what the program said last, under the name given."""
    name = called or " ".join(command[:5])
    try:
        done = subprocess.run(
            command,
            input=given,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise TimedOut(f"{name}: no answer within {timeout:g} s") from late
    if done.returncode:
        raise TimedOut(f"{name}: {(done.stderr.strip() or done.stdout.strip())[-2000:]}")
    return done.stdout
