"""`make test-all` sets every switch that adds tests, and CONTRIBUTING.md says what each needs."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SWITCH = re.compile(r'environ\.get\("([A-Z]+)"(?:, "")?\) [!=]= "all"')


def switches_of_tests() -> set[str]:
    """Return the variables that tests compare with `all`."""
    folders = ("tests", "e2e", "testcluster/tests")
    files = (file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return {name for file in files for name in SWITCH.findall(file.read_text())}


def test_every_switch_is_set_by_test_all_and_documented():
    found = switches_of_tests()
    assert {"STORES", "FAULTS", "KUBERNETES"} <= found
    makefile = (ROOT / "Makefile").read_text()
    assert found <= set(re.findall(r"^test-all: export ([A-Z]+) := all$", makefile, re.MULTILINE))
    documented = re.findall(r"^\| `([A-Z]+)=all` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert found <= set(documented)


def test_recipe_of_test_all_sees_the_switches(tmp_path: Path):
    rule = "test:\n\t@echo $$STORES $$FAULTS $$KUBERNETES\n"
    lines = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("test-all:")]
    (tmp_path / "Makefile").write_text("\n".join([*lines, rule]))
    done = subprocess.run(["make", "-C", tmp_path, "-s", "test-all"], capture_output=True, text=True, check=True)
    assert done.stdout == "all all all\n"
