"""The commands, one module each: `register` adds the arguments and sets `run`, which returns the exit code."""

import argparse
from typing import Protocol


class Commands(Protocol):
    """The object that argparse passes to `register`; argparse's own class is private."""

    def add_parser(
        self,
        name: str,
        *,
        help: str,  # noqa: A002  the name is argparse's
        description: str,
    ) -> argparse.ArgumentParser:
        """Add a command and return its parser."""
