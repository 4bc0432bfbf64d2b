"""Shows how a run goes on: in one output of a notebook, or in place on a terminal."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

from rich.console import Console, RenderableType
from rich.live import Live

Show = Callable[[RenderableType], None]
NOTEBOOK_COLUMNS = 110


@contextmanager
def screen() -> Iterator[Show]:
    """Yield a function that shows a text in place of the text before. A file gets the last text only."""
    console = Console(highlight=False, soft_wrap=True)
    if console.is_jupyter:
        # IPython is there in a notebook only.
        output = import_module("IPython.display").display(
            {"text/plain": ""}, raw=True, display_id=True
        )
        yield lambda shown: output.update({"text/plain": _text(shown)}, raw=True)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        yield lambda shown: live.update(shown, refresh=True)


def _text(shown: RenderableType) -> str:
    file = io.StringIO()
    console = Console(
        file=file, force_jupyter=False, highlight=False, width=NOTEBOOK_COLUMNS
    )
    console.print(shown)
    return file.getvalue()
