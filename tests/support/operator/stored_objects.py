"""Pipelines in many states, as this version of the operator stores them: the corpus of tests/data/stored.

Each released version adds a file, which no later version changes:

    PYTHONPATH=operator:trainer:tests python -m support.operator.stored_objects > tests/data/stored/NAME.json
"""

import json
from collections.abc import Callable
from typing import Any

from support.operator.scenario import Scenario, scores

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


def main() -> None:
    """Print the corpus, an object a line."""
    objects = [stored(name, build()) for name, build in BUILDERS.items()]
    lines = ",\n".join(json.dumps(entry) for entry in objects)
    print(f"[\n{lines}\n]")


if __name__ == "__main__":
    main()
