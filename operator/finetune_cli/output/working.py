"""A line on a terminal while a command works for seconds and has nothing to print yet."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def working(text: str) -> Iterator[None]:
    """Show the text and a spinner on stderr until the block ends; nothing if stderr is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    # Imported here: a pipe does not wait for it.
    from rich.console import Console  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    # No markup: a file may be called [red].
    with Console(stderr=True).status(Text(text)):
        yield
