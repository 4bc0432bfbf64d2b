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
    known = {"command": sys.argv, "machine": machine_facts()}
    file.write_text(json.dumps(known | figures, indent=1, default=str) + "\n")


def table(columns: list[str], rows: list[list[str]]) -> dict[str, Any]:
    """Return a table as a block of bench/results has it, so that its rows can be taken from the file."""
    return {"columns": columns, "rows": rows}
