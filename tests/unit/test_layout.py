import operator
import re
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARCHITECTURE = ROOT / "docs" / "concepts" / "architecture.md"
CONTRACTS = {
    "operator": "the folders of the operator: each layer sees only what is below it",
    "core": "the core: observe, assess, plan, report",
    "planning": "a plan: its parts below the plan",
    "attempts": "the attempts of a stage: their history, how each ended, what each cost",
    "capacity": "where an attempt runs: the policy knows no Job, the choice asks it",
    "kubernetes": "the Kubernetes adapter: pure readers and builders below the client",
    "trainer": "the folders of the trainer",
}


def test_operator_folder_does_not_hide_stdlib_operator_module():
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert not list((ROOT / "operator").glob("*.py"))
    assert Path(operator.__file__).is_relative_to(sysconfig.get_path("stdlib"))


def test_operator_package_has_few_modules_beside_its_folders():
    modules = {
        path.name for path in (ROOT / "operator" / "finetune_operator").glob("*.py")
    } - {"__init__.py"}
    assert modules == {"__main__.py", "cluster.py", "errors.py", "reconcile.py"}


def layers_drawn(picture: str) -> list[set[str]]:
    """Return the modules of each line of a picture of layers, from the top."""
    block = re.search(
        rf"^```layers {picture}\n(.*?)^```",
        ARCHITECTURE.read_text(),
        re.DOTALL | re.MULTILINE,
    )
    assert block, f"no picture of {picture}"
    return [
        set(re.split(r"\s{2,}", line)[0].split(" | ")) for line in block[1].splitlines()
    ]


def layers_checked(name: str) -> list[set[str]]:
    """Return the modules of each layer of an import-linter contract, from the top."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
        "importlinter"
    ]["contracts"]
    [layers] = [
        contract["layers"] for contract in contracts if contract["name"] == name
    ]
    return [
        {module.removeprefix("finetune_operator.") for module in layer.split(" | ")}
        for layer in layers
    ]


@pytest.mark.parametrize("picture", CONTRACTS)
def test_pictures_of_layers_match_the_checked_contracts(picture):
    checked = [
        layer for layer in layers_checked(CONTRACTS[picture]) if layer != {"__main__"}
    ]
    assert layers_drawn(picture) == checked


def test_pure_layers_are_the_ones_that_are_checked():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
        "importlinter"
    ]["contracts"]
    [pure] = [
        contract
        for contract in contracts
        if contract["name"].startswith("what is pure")
    ]
    named = re.search(r"(`core`.*?) are pure", ARCHITECTURE.read_text(), re.DOTALL)
    assert named
    assert {
        f"finetune_operator.{name}" for name in re.findall(r"`([\w.]+)`", named[1])
    } == set(pure["source_modules"])
