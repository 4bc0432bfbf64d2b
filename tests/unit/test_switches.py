"""`make test-all` sets every switch that adds tests, and CONTRIBUTING.md lists the needs of each."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SWITCH = re.compile(r'environ\.get\("([A-Z]+)"(?:, "")?\) [!=]= "all"')


def switches_of_tests() -> set[str]:
    """Return the variables that tests compare with `all`."""
    folders = ("tests", "e2e", "testcluster/tests")
    files = (file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return {name for file in files for name in SWITCH.findall(file.read_text())}


def test_every_switch_is_set_by_test_all_and_documented():
    switches = switches_of_tests()
    assert {"STORES", "FAULTS", "KUBERNETES"} <= switches
    makefile = (ROOT / "Makefile").read_text()
    assert switches <= set(
        re.findall(r"^test-all: export ([A-Z]+) := all$", makefile, re.MULTILINE)
    )
    documented = re.findall(
        r"^\| `([A-Z]+)=all` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    assert switches <= set(documented)


def test_recipe_of_test_all_sees_the_switches(tmp_path: Path):
    rule = "test-all:\n\t@echo $$STORES $$FAULTS $$KUBERNETES\n"
    lines = [
        line
        for line in (ROOT / "Makefile").read_text().splitlines()
        if line.startswith("test-all:")
    ]
    (tmp_path / "Makefile").write_text("\n".join([*lines, rule]))
    done = subprocess.run(
        ["make", "-C", tmp_path, "-s", "test-all"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "all all all\n"


@pytest.mark.parametrize(
    ("more", "code"), [([], 0), (["--ignore=e2e/kind/test_kind.py"], 4)]
)
def test_short_run_on_kind_needs_every_test_that_it_names(more: list[str], code: int):
    """A renamed test is like a missing file: without the error it would silently not run in .ci/run."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        *more,
        "e2e/kind",
    ]
    environment = os.environ | {"KIND": "short"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert ("change SHORT in its conftest.py" in done.stderr) is bool(code)
