"""Other people's programs, asked for an answer; their own words when there is none."""

from __future__ import annotations

import subprocess

from testcluster.errors import NotReady


def answer(*command: str, called: str = "", given: str = "", timeout: float = 60) -> str:
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
        raise NotReady(f"{name}: no answer within {timeout:g} s") from late
    if done.returncode:
        raise NotReady(f"{name}: {(done.stderr.strip() or done.stdout.strip())[-2000:]}")
    return done.stdout
