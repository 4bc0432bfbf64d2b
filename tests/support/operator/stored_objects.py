"""Pipelines in many states, as this version of the operator stores them: the corpus of tests/data/stored.

Each released version adds a file, which no later version changes:

    PYTHONPATH=operator:trainer:tests python -m support.operator.stored_objects > tests/data/stored/NAME.json
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.operator.scenario import Scenario, scores

from finetune_operator.api.status import PipelineStatus

FOLDER = Path(__file__).parents[2] / "data" / "stored"
RECORDED = {"observedVersion", "inputs", "execution", "resultsVersion"}
"""What a version may write into the status of another version."""

GATE_FAILS = {"evaluate": scores(0.1)}
DPO = {"objective": "DPO", "dpo": {"beta": 0.2}}
OWN_PROGRAM = {"pod": {"image": "team/train:1", "command": ["python", "-m", "mine"]}}
START = {"startFrom": {"uri": "pvc://models/sft/latest"}}


def edited(**changes: Any) -> Scenario:
    scenario = Scenario()
    return scenario.edit(**changes)


def training(scenario: Scenario) -> Scenario:
    """Return the scenario with a training at step 5 of its second attempt."""
    scenario.run("prepare")
    scenario.cluster.evict(scenario.start("train"), step=5, saved=5)
    job = scenario.reconcile_until_stable().start("train")
    scenario.cluster.progress(job, 7, start_step=5)
    return scenario.reconcile_until_stable()


def stopping() -> Scenario:
    """Return a scenario whose training is being stopped, because the spec has changed."""
    scenario = training(Scenario())
    return scenario.edit(train={"optimizer": {"learningRate": 3e-4}})


def out_of_retries() -> Scenario:
    scenario = Scenario()
    scenario.edit(prepare={"maxFailures": 0})
    scenario.cluster.fail(scenario.start("prepare"), 1)
    return scenario.reconcile_until_stable()


def finished_again() -> Scenario:
    """Return a scenario that finished, was edited, and finished again."""
    scenario = Scenario().finish()
    scenario.edit(train={"lora": {"rank": 8}})
    return scenario.finish()


BUILDERS: dict[str, Callable[[], Scenario]] = {
    "queued": lambda: Scenario().reconcile_until_stable(),
    "training": lambda: training(Scenario()),
    "stopping": stopping,
    "suspended": lambda: edited(suspend=True),
    "cancelled": lambda: Scenario().reconcile_until_stable().cancel("1").finish(),
    "out-of-retries": out_of_retries,
    "below-threshold": lambda: Scenario().finish(**GATE_FAILS),
    "serving": lambda: Scenario().finish(),
    "finished-again": finished_again,
    "without-deploy": lambda: edited(deploy=None).finish(),
    "preferences": lambda: training(edited(train=DPO)),
    "preferences-finished": lambda: edited(train=DPO, deploy=None).finish(),
    "started-adapter": lambda: edited(train=START).finish(),
    "own-program": lambda: edited(train=OWN_PROGRAM, deploy=None).finish(),
    "own-program-running": lambda: training(edited(train=OWN_PROGRAM)),
    "conversations": lambda: Scenario().finish(prepare={"conversations": True}),
}


def stored(name: str, scenario: Scenario) -> dict[str, Any]:
    """Return what the API server has of a pipeline, and what a watch shows of its Jobs and servers."""
    cluster = scenario.cluster
    pipeline = cluster.pipelines[scenario.key]
    jobs = [
        {
            "name": job,
            "stage": entry.template.stage,
            "state": entry.observed.state.name,
            "createdAt": str(entry.observed.created_at or ""),
            "startedAt": str(entry.observed.started_at or ""),
        }
        for job, entry in cluster.jobs.items()
    ]
    return {
        "name": name,
        "now": str(cluster.now),
        "generation": pipeline.generation,
        "annotations": pipeline.annotations,
        "spec": json.loads(pipeline.spec),
        "status": json.loads(pipeline.status),
        "jobs": jobs,
        "servers": {
            job: {"stage": server.stage, "current": server.current}
            for job, server in cluster.servers.items()
        },
    }


def corpus() -> list[tuple[str, dict[str, Any]]]:
    """Return each stored pipeline with the name of its file."""
    files = sorted(FOLDER.glob("*.json"))
    return [
        (file.stem, entry) for file in files for entry in json.loads(file.read_text())
    ]


def changes(
    entry: dict[str, Any], before: PipelineStatus, after: PipelineStatus
) -> list[str]:
    """Return what an operator has changed in a stored status, besides what an upgrade records."""
    # Since then, a Job whose process has not started is no running pipeline. No operator reads the phase.
    known = "$.phase: Running -> Pending" if entry["name"] == "queued" else ""
    differing = differences("$", dump(before), dump(after))
    return [change for change in differing if change != known]


def dump(status: PipelineStatus) -> Any:
    """Return a status as JSON, without the names of results that no attempt has begun to make."""
    value = status.model_dump(mode="json", by_alias=True)
    for stage in value["stages"]:
        begun = [attempt["identity"] for attempt in stage["attempts"]]
        if stage["identity"] not in begun:
            for name in ("identity", "startedAt", "budgetBaseAttempt", "progress"):
                del stage[name]
    return value


def differences(path: str, before: Any, after: Any) -> Iterator[str]:
    """Yield the paths at which two JSON values differ, but for what an upgrade records."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted({*before, *after} - RECORDED):
            yield from differences(f"{path}.{name}", before.get(name), after.get(name))
    elif isinstance(before, list) and isinstance(after, list):
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from differences(f"{path}.{number}", old, new)
    elif before != after:
        yield f"{path}: {before} -> {after}"


def main() -> None:
    """Print the corpus, an object a line."""
    objects = [stored(name, build()) for name, build in BUILDERS.items()]
    lines = ",\n".join(json.dumps(entry) for entry in objects)
    print(f"[\n{lines}\n]")


if __name__ == "__main__":
    main()
