"""The files of a checkout."""

import subprocess
from pathlib import Path


def tracked(root: Path, *patterns: str) -> list[Path]:
    """Return the files that git tracks, or would track, so that a new file counts before its commit."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--"]
    output = subprocess.run(
        [*command, *patterns], cwd=root, check=True, capture_output=True, text=True
    ).stdout
    paths = [root / name for name in output.splitlines()]
    # A file that was deleted and not committed is still listed.
    return [path for path in paths if path.is_file()]
