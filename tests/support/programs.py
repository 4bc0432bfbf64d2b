"""Go programs that tests run, and what tests do without them."""

import os
from typing import NoReturn

import pytest

from testcluster import binaries, deps
from testcluster.errors import UsageError


def program(name: str) -> str:
    """Return the path of a Go program; build it if it is missing. Skip the test where it cannot be built."""
    try:
        deps.build([name])
    except UsageError as error:
        missing(str(error))
    return str(binaries.folder(name) / name)


def missing(text: str) -> NoReturn:
    """Skip the test with what is missing; fail where CI=true."""
    if os.environ.get("CI", "") in {"true", "1"}:
        pytest.fail(text)
    pytest.skip(text)
