"""The real kstatus library, which Flux and Helm use, as one process for all tests."""

import json
import subprocess
from functools import cache
from typing import Any

from support.operator.pipeline_objects import stored_object
from support.operator.scenario import Scenario
from support.programs import program


def kstatus(scenario: Scenario) -> str:
    """Return the status that kstatus computes for the scenario's pipeline."""
    return kstatus_of(stored_object(scenario))


def kstatus_of(pipeline: dict[str, Any]) -> str:
    """Return the status that kstatus computes for an object. Flux's copy of the library and the original agree."""
    process = _process()
    assert process.stdin
    assert process.stdout
    process.stdin.write(json.dumps(pipeline) + "\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.readline())
    assert answer["flux"] == answer["original"]
    return str(answer["flux"])


@cache
def _process() -> subprocess.Popen[str]:
    """Start the process. It ends with this process, because its standard input is then closed."""
    return subprocess.Popen(
        [program("kstatus")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
