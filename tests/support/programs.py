"""Programs that tests run, and the outcome of tests without them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from testcluster import binaries, deps
from testcluster.cluster_state import cache, locked
from testcluster.errors import UsageError

COMPLETE = ".complete"
"""A file in a folder whose installation has ended."""


def program(name: str) -> str:
    """Return the path of a Go program; build it if it is missing. Skip the test if it cannot be built."""
    try:
        deps.build([name])
    except UsageError as error:
        missing(str(error))
    return str(binaries.folder(name) / name)


def installed(name: str, install: Callable[[Path], None]) -> Path:
    """Return a folder of the cache; install into it first unless that is done. Another process may want it, too."""
    folder = cache() / name
    with locked(folder):
        if not (folder / COMPLETE).exists():
            install(folder)
            (folder / COMPLETE).touch()
    return folder


def source(name: str) -> Path:
    """Return the folder with a Go program's source. Skip the test if it cannot be downloaded."""
    try:
        return binaries.source(name)
    except UsageError as error:
        missing(str(error))


def missing(text: str) -> NoReturn:
    """Skip the test with the missing program in the message; fail if CI=true."""
    if os.environ.get("CI", "") in {"true", "1"}:
        pytest.fail(text)
    pytest.skip(text)
