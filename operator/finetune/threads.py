"""Work that starts an event loop of its own, even if an event loop is already running, as in a notebook."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> T:
    """Return the result of work that is done in a new thread."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(work).result()
