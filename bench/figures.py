"""The figures of a benchmark in a file, with what they depend on: the command and the machine."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from processes import machine_facts


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add the option --json FILE."""
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all figures to this file"
    )


def write_figures(file: Path | None, figures: dict[str, Any]) -> None:
    """Write the figures as JSON; do nothing without a file."""
    if file is None:
        return
    # Without --json: the file's own path is no part of what the figures depend on.
    command = [*sys.argv]
    if "--json" in command:
        at = command.index("--json")
        del command[at : at + 2]
    known = {"command": command, "machine": machine_facts()}
    file.write_text(json.dumps(known | figures, indent=1, default=str) + "\n")


def table(columns: list[str], rows: list[list[str]]) -> dict[str, Any]:
    """Return a table as the key `tables` of a file has it, which the page of all measurements shows."""
    return {"columns": columns, "rows": rows}


def print_table(columns: list[str], rows: list[list[str]]) -> None:
    """Print a table of Markdown."""
    for cells in (columns, ["---"] * len(columns), *rows):
        print(f"| {' | '.join(cells)} |", flush=True)
