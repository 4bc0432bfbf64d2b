"""A new stage is one file and one field of the spec; a new capacity type or engine is one line."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.operator.scenario import ORDER

ROOT = Path(__file__).parents[3]
OPERATOR = ROOT / "operator" / "finetune_operator"
TRAINER = ROOT / "trainer" / "finetune_trainer"
MAY_NAME_STAGES = {
    OPERATOR / "api" / "spec.py",
    *(OPERATOR / "api" / "stages").glob("*.py"),
}

NEW_STAGE = '''
"""Test the adapter with unsafe prompts."""

from typing import ClassVar, Literal

from finetune_operator.api.stages.base import ConfigContext, StageSpec
from finetune_trainer.contract import StageConfig


class SafetyConfig(StageConfig):
    stage: Literal["safety"] = "safety"
    train: str
    questions: int


class Safety(StageSpec):
    """Tests the adapter with unsafe prompts."""

    name: ClassVar[str] = "safety"
    condition: ClassVar[str] = "Safeguarded"
    needs: ClassVar[tuple[str, ...]] = ("train",)
    pool: ClassVar[str] = "eval"

    questions: int = 5
    """Number of prompts."""

    def config(self, context: ConfigContext) -> SafetyConfig:
        return SafetyConfig(identity="", train=context.identities["train"], questions=self.questions)
'''

SPOT_LINE = '    "Spot": lambda defaults: _set_or(defaults.spot, PRESETS[defaults.preset].spot),\n'
NEW_PLACEMENT = '    "Reserved": lambda _: Nodes(node_selector={"reserved": "true"}),\n'

NEW_ENGINE = '    "Llamafile": Engine(_transformers_container, _transformers_process, "llamafile"),\n'

SCRIPT = """
from support.operator.scenario import RESULTS, Scenario, a_pipeline

from finetune_operator.crd.generate import text

RESULTS["safety"] = {**RESULTS["evaluate"], "stage": "evaluate"}
pipeline = a_pipeline(deploy={"engine": "Llamafile"}, safety={"placement": {"capacity": "Reserved"}})
scenario = Scenario(pipeline).run_before("safety")
scenario.lose_node(scenario.start("safety"))
scenario.reconcile_until_stable().finish()
print(*sorted(scenario.created_jobs))
print(scenario.status.phase, *scenario.condition("Safeguarded"))
print(scenario.cluster.jobs[scenario.attempt("safety").job].template.placement.node_selector)
scenario.edit(safety={"questions": 9}).finish()
print(scenario.created_jobs[-1])
crd = text()
print("questions" in crd, "Reserved" in crd, "Llamafile" in crd)
"""


@pytest.fixture
def extended(tmp_path) -> Path:
    """Return a copy of the operator and the trainer with an additional stage, capacity type and engine."""
    trainer = shutil.copytree(
        TRAINER, tmp_path / TRAINER.name, ignore=shutil.ignore_patterns("__pycache__")
    )
    vllm = '    "VLLM": Engine(_vllm_container, _vllm_process, "vllm"),\n'
    add(trainer / "contract" / "engines.py", after=vllm, line=NEW_ENGINE)
    package = tmp_path / "finetune_operator"
    shutil.copytree(OPERATOR, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "api" / "stages" / "safety.py").write_text(NEW_STAGE)
    add(
        package / "api" / "spec.py",
        after="from finetune_operator.api.stages.push import Push\n",
        line="from finetune_operator.api.stages.safety import Safety\n",
    )
    add(
        package / "api" / "spec.py",
        after='    """Evaluates the trained model. Absent: no evaluation and no gate."""\n',
        line="    safety: Safety | None = None\n",
    )
    add(package / "api" / "placement.py", after=SPOT_LINE, line=NEW_PLACEMENT)
    return tmp_path


def add(path: Path, *, after: str, line: str) -> None:
    text = path.read_text()
    assert text.count(after) == 1, f"{path} must contain this line once: {after}"
    path.write_text(text.replace(after, after + line))


def test_new_stage_placement_and_engine_need_nothing_else(extended):
    paths = (extended, ROOT / "tests")
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.stderr == ""
    assert process.stdout.splitlines() == [
        "deploy-a1 evaluate-a1 prepare-a1 push-a1 safety-a1 safety-a2 train-a1",
        "Succeeded True StageSucceeded",
        "{'reserved': 'true'}",
        "safety-a3",
        "True True True",
    ]


def names_of_stages(tree: ast.AST) -> list[str]:
    """Return the stage names in the code, as strings and as attributes."""
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    attributes = [
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    ]
    return [name for name in (*texts, *attributes) if name in ORDER]


def test_no_stage_is_named_outside_its_file_and_the_spec():
    stage_names = {
        path: names_of_stages(ast.parse(path.read_text()))
        for path in OPERATOR.rglob("*.py")
    }
    assert {
        path: names
        for path, names in stage_names.items()
        if names and path not in MAY_NAME_STAGES
    } == {}
    assert names_of_stages(ast.parse("x = spec.train"))
    assert names_of_stages(ast.parse("views['push']"))
