"""Silence for warnings of libraries about the way in which this program calls them: a user can change nothing."""

import contextlib
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def without_deprecations(attribute: str) -> Iterator[None]:
    """Ignore in this block that one library uses an attribute which another library deprecates."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", f"`{attribute}`", FutureWarning)
        yield


@contextlib.contextmanager
def without_messages(logger: str, *beginnings: str) -> Iterator[None]:
    """Drop in this block the messages of a logger that begin so."""

    def keep(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(beginnings)

    target = logging.getLogger(logger)
    target.addFilter(keep)
    try:
        yield
    finally:
        target.removeFilter(keep)
