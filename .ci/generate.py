"""Generate the reference pages, the files of Argo CD and the chart's README; --check compares.

Each module in `generated` returns the files that it generates, as path -> text. A file whose text is None must not
exist.
"""

import argparse
import sys
from pathlib import Path

from generated import argocd_files, chart_readme, measurements, reference_pages

ROOT = Path(__file__).resolve().parents[1]


def main(arguments: list[str]) -> int:
    """Write every file that differs from what is generated; with --check, return 1 if there is one."""
    parser = argparse.ArgumentParser(prog="generate.py", description=__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit 1 where a file is out of date",
    )
    check = parser.parse_args(arguments).check
    expected = reference_pages.files() | measurements.files()
    expected |= argocd_files.files() | chart_readme.files()
    differing = [
        path
        for path, text in expected.items()
        if (path.read_text() if path.exists() else None) != text
    ]
    for path in differing:
        if check:
            print(
                f"{path.relative_to(ROOT)} is out of date: run `make docs`",
                file=sys.stderr,
            )
        else:
            write(path, expected[path])
    return int(check and bool(differing))


def write(path: Path, text: str | None) -> None:
    """Write a file, or delete it where there is no text."""
    if text is None:
        path.unlink()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
