"""The expressions of deploy/flux/health-check-exprs.yaml in Flux's own evaluator, for each state of a pipeline."""

import json
import subprocess
from pathlib import Path

from support.operator.pipeline_objects import Object
from support.operator.pipeline_states import FAILED, STATES
from support.programs import program

from e2e.gitops.manifests import without_stalled
from e2e.gitops.second_lane import more

ROOT = Path(__file__).resolve().parents[2]
EXPRESSIONS = ROOT / "deploy" / "flux" / "health-check-exprs.yaml"
pytestmark = more


def evaluate(folder: Path, objects: dict[str, Object]) -> dict[str, str]:
    """Return for each object the status that Flux computes, or the error of its evaluator."""
    paths = [folder / f"{name}.json" for name in objects]
    for path, pipeline in zip(paths, objects.values(), strict=True):
        path.write_text(json.dumps(pipeline))
    output = subprocess.check_output(
        [program("flux-health"), EXPRESSIONS, *paths], text=True
    )
    answers = [json.loads(line) for line in output.splitlines()]
    statuses = [answer["error"] or answer["status"] for answer in answers]
    return dict(zip(objects, statuses, strict=True))


def test_expressions_say_of_each_state_what_kstatus_says(tmp_path: Path) -> None:
    statuses = evaluate(
        tmp_path, {name: state.object() for name, state in STATES.items()}
    )
    assert statuses == {name: state.kstatus for name, state in STATES.items()}


def test_expressions_without_stalled_find_failed_pipelines(tmp_path: Path) -> None:
    failed = {
        name: state.object()
        for name, state in STATES.items()
        if state.kstatus == FAILED
    }
    del failed["unreadable"]  # has no end
    failed = {
        name: {**pipeline, "status": without_stalled(pipeline["status"])}
        for name, pipeline in failed.items()
    }
    assert set(evaluate(tmp_path, failed).values()) == {FAILED}
