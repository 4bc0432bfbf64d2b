"""The page of all measurements, from the files in bench/results."""

import json
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "measurements.md"
RESULTS = ROOT / "bench" / "results"
COLUMNS = 100
HEAD = """# Measurements

<!-- Generated from bench/results by `make docs`; do not edit. -->

[Benchmarks](../benchmarks.md) is the short page. All figures but those
[on a GPU](#on-a-gpu) come from 2 cores without a GPU. Ratios compare programs that ran side by side
in one invocation. Each row names its command.
"""

Block = dict[str, Any]


def files() -> dict[Path, str]:
    """Return the page."""
    results = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))]
    results.sort(key=lambda result: result["order"])
    return {PAGE: HEAD + "".join(section(result) for result in results)}


def section(result: dict[str, Any]) -> str:
    """Return the section of a file: its title, then its blocks in their order."""
    blocks = "\n\n".join(block_text(block) for block in result["blocks"])
    return f"\n## {result['title']}\n\n{blocks}\n"


def block_text(block: Block) -> str:
    """Return a table, a list, a picture, a paragraph or all tables of a run as Markdown."""
    if "run" in block:
        # As `--json` of a benchmark has written it: no figure is copied by hand.
        run = json.loads((RESULTS / block["run"]).read_text())
        return "\n\n".join(block_text(table) for table in run["tables"])
    if "columns" in block:
        lines = [block["columns"], ["---"] * len(block["columns"]), *block["rows"]]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    if "list" in block:
        return "\n".join(wrapped(f"- {item}", "  ") for item in block["list"])
    if "picture" in block:
        return str(block["picture"])
    return wrapped(block["text"], "")


def wrapped(text: str, indent: str) -> str:
    """Return a paragraph in lines of at most 100 columns."""
    return textwrap.fill(
        text,
        COLUMNS,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
