"""Requests to a process that forks a child for each: a JSON object a line from stdin, and a line in answer to each.

To a request that starts a child, the answer is the child's pid. To `{"wait": PID}` it is the exit code, once the child
has ended.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(run: Callable[[dict[str, Any]], None]) -> None:
    """Answer every request until stdin is closed; `run` is called in the child and never returns."""
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
