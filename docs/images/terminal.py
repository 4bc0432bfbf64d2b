"""Draw docs/images/run.svg from a real `finetune run --evict` of the demo's manifest; `make demo` makes the material.

    .venv/bin/python docs/images/terminal.py

The run is in a temporary folder. Nothing in the picture is written by hand but the prompt. A line that is longer
than the picture is wide ends with an ellipsis.
"""

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
PICTURE = Path(__file__).with_name("run.svg")
COLUMNS = 124
PROMPT = "$ finetune run pipeline.yaml --claim demo=.demo/material --evict train@100"
THEME = TerminalTheme(
    (13, 17, 23),
    (230, 237, 243),
    [
        *[(72, 79, 88), (255, 123, 114), (63, 185, 80), (210, 153, 34)],
        *[(88, 166, 255), (188, 140, 255), (57, 197, 207), (177, 186, 196)],
    ],
)
STYLES = (
    (r"^\$ .*", "bold"),
    (r"AttemptInterrupted|Interrupted|evicted[^;]*|interruptions?.*", "yellow"),
    (r"Succeeded|StageSucceeded|gate open|✔", "green"),
    (r"AttemptStarted", "cyan"),
)


def main() -> int:
    """Run the pipeline, write the picture, and return the exit code of the run."""
    material = Path(os.environ.get("DEMO_MATERIAL", ROOT / ".demo" / "material"))
    if not (material / "base-model").is_dir():
        print(
            f"{material} holds no demo material: run `make demo` first", file=sys.stderr
        )
        return 2
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "finetune_cli",
            "run",
            str(ROOT / "examples" / "demo" / "pipeline.yaml"),
        ]
        options = [
            "--claim",
            f"demo={material}",
            "--workdir",
            folder,
            "--evict",
            "train@100",
        ]
        environment = os.environ | {
            "COLUMNS": str(COLUMNS),
            "PYTHONPATH": f"{ROOT}/operator:{ROOT}/trainer",
        }
        run = subprocess.run(
            [*command, *options],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [
            line.replace(folder, ".finetune/docstrings")
            for line in run.stdout.splitlines()
        ]
    if run.returncode:
        print(run.stdout, run.stderr, sep="\n", file=sys.stderr)
        return run.returncode
    PICTURE.write_text(picture([PROMPT, *lines]))
    print(f"wrote {PICTURE}")
    return 0


def picture(lines: list[str]) -> str:
    """Return the lines as an SVG of a terminal."""
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True
    )
    for line in lines:
        text = Text(line)
        for pattern, style in STYLES:
            text.highlight_regex(pattern, style)
        console.print(text, no_wrap=True, overflow="ellipsis")
    svg = console.export_svg(title="finetune run", theme=THEME, unique_id="run")
    # Its font would be loaded from a server on the internet. The reader's own monospace font is used instead.
    return re.sub(r"@font-face \{.*?\n    \}\n", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    sys.exit(main())
