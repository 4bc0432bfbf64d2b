"""The commands, one module each: `register` adds its arguments and sets `run`, which gives the exit code."""

import argparse
from typing import Protocol


class Commands(Protocol):
    """What argparse hands to `register`; its own name for it is private."""

    def add_parser(self, name: str, *, help: str, description: str) -> argparse.ArgumentParser:  # noqa: A002  argparse's word
        """Give the parser for one command."""
