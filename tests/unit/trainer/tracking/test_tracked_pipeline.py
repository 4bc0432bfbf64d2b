"""A whole pipeline of real stages, evicted and killed: one run with each tracker, each step once.

test_tracked_training.py kills a training five times.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.trainer.lm_eval_tasks import write_verbs_task
from support.trainer.mlflow_server import MlflowServer
from support.trainer.models import prompt_records, write_jsonl
from support.trainer.tracker_files import wandb_runs

STEPS = 12
FAULTS = (
    "--evict",
    "train@4",
    "--kill",
    "train@8",
)


def manifest(model: Path, mlflow: MlflowServer) -> dict[str, object]:
    spec = {
        "model": {"uri": f"file://{model}"},
        "datasets": [{"uri": "data.jsonl"}],
        "tracking": {
            "mlflow": {
                "uri": mlflow.uri,
                "experiment": "tickets",
                "registeredModel": "tickets",
            },
            "wandb": {"project": "tickets", "mode": "Offline"},
        },
        "prepare": {"contextLength": 64},
        "train": {
            "maxSteps": STEPS,
            "microBatchSize": 2,
            "checkpoint": {"everySteps": 2},
        },
        "evaluate": {
            "tasks": [{"name": "verbs", "file": "tasks/verbs.yaml", "limit": 8}]
        },
        "push": {"targets": [{"uri": "published"}]},
    }
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTunePipeline",
        "metadata": {"name": "t"},
        "spec": spec,
    }


@pytest.mark.skipif(
    os.environ.get("TRAINING") != "all",
    reason="TRAINING=all runs it: a minute and a half; test_tracked_training.py has the stage that is killed",
)
def test_pipeline_with_faults_is_one_run_with_its_model(
    tmp_path: Path, tiny_model: Path, mlflow: MlflowServer
) -> None:
    write_jsonl(tmp_path / "data.jsonl", prompt_records(200))
    write_verbs_task(tmp_path / "tasks")
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(manifest(tiny_model, mlflow)))
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    command = [sys.executable, "-m", "finetune_cli", "run", "t.yaml", *FAULTS]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=variables,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    folder = tmp_path / ".finetune" / "t"
    status = json.loads((folder / "pipeline.json").read_text())["status"]
    stages = {stage["name"]: stage for stage in status["stages"]}
    assert stages["train"]["interruptions"] == len(FAULTS) // 2
    [run] = mlflow.runs.values()
    assert [step for step, _ in mlflow.metrics(run)["loss"]] == list(
        range(1, STEPS + 1)
    )
    # Each stage writes files of its own. W&B takes files with the same id for one run.
    offline = []
    for files in folder.rglob("wandb"):
        offline += wandb_runs(files)
    assert len({part["id"] for part in offline}) == 1
    [losses] = [part["points"]["loss"] for part in offline if "loss" in part["points"]]
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    [version] = mlflow.versions["tickets"]
    tags = {tag["key"]: tag["value"] for tag in version["tags"]}
    assert tags["finetune.digest"] == stages["push"]["result"]["digest"]
    assert version["source"] == status["model"]["uri"]
