"""Health and actions in Argo CD's own Lua VM, for each state of a pipeline."""

import json
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.operator.pipeline_states import STATES
from support.operator.scenario import merged
from support.programs import program

ROOT = Path(__file__).resolve().parents[2]
ARGOCD = ROOT / "deploy" / "argocd"
RESOURCE = ARGOCD / "finetune.dev" / "FineTunePipeline"
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
PATCHES = {
    "suspend": {"spec": {"suspend": True}},
    "resume": {"spec": {"suspend": False}},
    "retry": {"metadata": {"annotations": {"finetune.dev/retry": "TIME"}}},
    "cancel": {"metadata": {"annotations": {"finetune.dev/cancel": "TIME"}}},
}
Answer = dict[str, Any]


def ask(objects: list[Path]) -> list[Answer]:
    """Return health and actions of each object in Argo CD with the committed patch of its ConfigMap."""
    command = [program("luavm"), str(ARGOCD / "argocd-cm.yaml"), *map(str, objects)]
    output = subprocess.check_output(command, text=True)
    return [json.loads(line) for line in output.splitlines()]


@cache
def answers_of_examples() -> dict[str, Answer]:
    examples = sorted((RESOURCE / "testdata").glob("*.yaml"))
    return {Path(answer["file"]).name: answer for answer in ask(examples)}


def example_of(test: dict[str, Any]) -> Answer:
    """Return the answer for the example that a test of Argo CD's own format names."""
    return answers_of_examples()[Path(test["inputPath"]).name]


@pytest.fixture(scope="module")
def full_answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """Health and actions of whole objects in Argo CD: all defaults of the spec, and all stages."""
    folder = tmp_path_factory.mktemp("objects")
    paths = [folder / f"{name}.json" for name in STATES]
    for path, state in zip(paths, STATES.values(), strict=True):
        path.write_text(json.dumps(state.object()))
    return dict(zip(STATES, ask(paths), strict=True))


def offered(answer: Answer) -> list[str]:
    return [action["name"] for action in answer["actions"] or ()]


@pytest.mark.parametrize("state", STATES)
def test_state_has_its_health_and_actions(
    full_answers: dict[str, Answer], state: str
) -> None:
    expected = STATES[state]
    answer = full_answers[state]
    assert answer["health"] == {
        "status": expected.health,
        "message": expected.health_message(),
    }
    assert sorted(offered(answer)) == list(expected.actions)


@pytest.mark.parametrize("state", STATES)
def test_action_changes_exactly_one_field(
    full_answers: dict[str, Answer], state: str
) -> None:
    answer = full_answers[state]
    patches = json.loads(TIME.sub("TIME", json.dumps(answer["patches"])))
    assert patches == {verb: PATCHES[verb] for verb in offered(answer)}


def test_examples_have_the_health_of_their_test_file() -> None:
    tests = yaml.safe_load((RESOURCE / "health_test.yaml").read_text())["tests"]
    assert {Path(test["inputPath"]).name for test in tests} == set(
        answers_of_examples()
    )
    for test in tests:
        assert example_of(test)["health"] == test["healthStatus"], test["inputPath"]


def test_examples_offer_the_actions_of_their_test_file() -> None:
    """With their icons, as Argo CD's own test compares them."""
    file = RESOURCE / "actions" / "action_test.yaml"
    tests = yaml.safe_load(file.read_text())["discoveryTests"]
    for test in tests:
        actions = example_of(test)["actions"] or ()
        listed = [{"disabled": False, **action} for action in actions]
        listed.sort(key=lambda action: action["name"])
        assert listed == test["result"], test["inputPath"]


def test_actions_have_the_outputs_of_their_test_file() -> None:
    folder = RESOURCE / "actions"
    tests = yaml.safe_load((folder / "action_test.yaml").read_text())["actionTests"]
    assert {test["action"] for test in tests} == {"suspend", "resume"}
    for test in tests:
        before = yaml.safe_load((folder / test["inputPath"]).read_text())
        after = yaml.safe_load((folder / test["expectedOutputPath"]).read_text())
        patch = example_of(test)["patches"][test["action"]]
        assert merged(before, patch) == after
        assert before != after


def test_script_needs_no_open_libraries() -> None:
    """Argo CD opens them for its own scripts, and for a user's scripts only if `useOpenLibs` is set."""
    data = yaml.safe_load((ARGOCD / "argocd-cm.yaml").read_text())["data"]
    assert not any("useOpenLibs" in key for key in data)
