"""External programs: run one and return its output, or raise with its error output."""

from __future__ import annotations

import subprocess

from testcluster.errors import TimedOut


def run_command(
    *command: str, called: str = "", given: str = "", timeout: float = 60
) -> str:
    """Run a command and return its standard output.

    `called` is the name used in errors, by default the first five words. `given` is written to standard input.
    Raises TimedOut with the end of the program's output when it fails, or when it takes longer than `timeout` seconds.
    """
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
    except subprocess.TimeoutExpired as expired:
        raise TimedOut(f"{name}: did not finish within {timeout:g} s") from expired
    if done.returncode:
        raise TimedOut(
            f"{name}: {(done.stderr.strip() or done.stdout.strip())[-2000:]}"
        )
    return done.stdout


def contained(*command: str) -> list[str]:
    """Return the command line that runs a command in a mount and a pid namespace of its own.

    The kernel ends all its processes with the calling thread, however that ends: setpriv lets unshare receive SIGKILL
    then, and unshare passes it to the namespace's first process.
    """
    namespaces = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["setpriv", "--pdeathsig=KILL", "unshare", *namespaces, *command]
