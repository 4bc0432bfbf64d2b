"""The recipes of the docs run as they are written, with the demo's model."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from finetune_cli.__main__ import main

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
FILES = re.compile(
    r"Save this as\s+`([\w.]+)`.*?^```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL
)


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """The demo's material, made as the recipes say."""
    folder = tmp_path_factory.mktemp("demo")
    program = ROOT / "examples/demo/material.py"
    subprocess.run([sys.executable, program, folder], check=True)
    return folder


@pytest.mark.skipif(
    os.environ.get("TRAINING") != "all",
    reason="TRAINING=all runs it: a base model of fewer steps learns no recipe, and this takes minutes",
)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_recipe_makes_a_model_better_than_its_base(
    recipe, material, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.findall(recipe.read_text()):
        Path(name).write_text(text)
    Path(".demo").mkdir()
    Path(".demo/material").symlink_to(material)
    subprocess.run([sys.executable, "data.py"], check=True)
    assert main(["run", "pipeline.yaml", "--until", "evaluate", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert [gate["passed"] for gate in status["gates"]] == [True]
