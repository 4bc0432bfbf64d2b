"""Pages as a headless Chromium shows them, on a machine that has one."""

import shutil
import subprocess
import tempfile

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
SCRIPT_MILLISECONDS = 15_000
"""Time of a page's own clock, which does not wait: its scripts have ended by then."""


def browser() -> str | None:
    """Return the path of a browser, or None."""
    for program in PROGRAMS:
        path = shutil.which(program)
        if path:
            return path
    return None


def shown_by_browser(url: str) -> str:
    """Return the HTML of a page after its scripts have run."""
    program = browser()
    assert program
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = (
            "--headless",
            # Root, as in continuous integration, has no sandbox.
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            # A profile of its own: a second browser on one profile waits for the first.
            f"--user-data-dir={profile}",
            f"--virtual-time-budget={SCRIPT_MILLISECONDS}",
            "--dump-dom",
        )
        done = subprocess.run(
            [program, *options, url],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    return done.stdout
