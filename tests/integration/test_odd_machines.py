"""A whole pipeline, from the data to an answer of the served model, on a machine without IPv4 and as any user."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.trainer.lm_eval_tasks import write_verbs_task
from support.trainer.models import prompt_records, write_jsonl

ROOT = Path(__file__).parents[2]
UID = 1_000_680_000
"""In the range that OpenShift gives to a namespace."""
WITHOUT_IPV4 = (
    *("unshare", "--net", "sh", "-ec"),
    'ip link set lo up && ip addr del 127.0.0.1/8 dev lo && exec "$@"',
    "sh",
)
ANY_USER = ("unshare", "--user", f"--map-user={UID}", "--map-group=0")
STAGES = ("prepare", "train", "evaluate", "push", "deploy")
RECORDS = prompt_records(200)


def manifest(model: Path, processes: int) -> dict[str, object]:
    """Return a pipeline whose model learns in seconds to answer with a verb."""
    spec = {
        "model": {"uri": f"file://{model}"},
        "datasets": [{"uri": "data.jsonl"}],
        "prepare": {"contextLength": 64},
        "train": {
            "maxSteps": 30,
            "microBatchSize": 8,
            "processesPerNode": processes,
            "dtype": "FP32",
            "optimizer": {"learningRate": 0.005},
        },
        "evaluate": {
            "tasks": [{"name": "verbs", "file": "tasks/verbs.yaml", "limit": 8}],
            "gates": [{"task": "verbs", "metric": "acc", "value": 0.0}],
        },
        "push": {"targets": [{"uri": "published"}], "dtype": "FP32"},
        "deploy": {
            "engine": "Transformers",
            "smokeTest": {"prompt": RECORDS[0]["prompt"], "maxTokens": 4},
        },
    }
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTunePipeline",
        "metadata": {"name": "odd"},
        "spec": spec,
    }


def environment(home: Path) -> dict[str, str]:
    """Return the variables of a container, whose HOME this user may not write."""
    home.mkdir(mode=0o555)
    paths = (str(ROOT / "operator"), str(ROOT / "trainer"))
    return {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(home),
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_WAIT_POLICY": "PASSIVE",
    }


# Two processes of a training meet at an address of the machine.
MACHINES: dict[str, tuple[tuple[str, ...], int]] = {"without-ipv4": (WITHOUT_IPV4, 2)}
if os.environ.get("FAULTS") == "all":
    # A minute. tests/unit/trainer/stages/test_arbitrary_user.py has each stage.
    MACHINES["any-user"] = (ANY_USER, 1)


@pytest.mark.parametrize(("prefix", "processes"), MACHINES.values(), ids=MACHINES)
def test_pipeline_is_deployed(
    prefix: tuple[str, ...], processes: int, tmp_path: Path, tiny_model: Path
) -> None:
    write_jsonl(tmp_path / "data.jsonl", RECORDS)
    write_verbs_task(tmp_path / "tasks")
    (tmp_path / "odd.yaml").write_text(yaml.safe_dump(manifest(tiny_model, processes)))
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "finetune_cli", "run", "odd.yaml"],
        cwd=tmp_path,
        env=environment(tmp_path / "home"),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    pipeline = json.loads(
        (tmp_path / ".finetune" / "odd" / "pipeline.json").read_text()
    )
    stages = {stage["name"]: stage for stage in pipeline["status"]["stages"]}
    states = {name: stages[name]["state"] for name in STAGES}
    assert states == dict.fromkeys(STAGES, "Succeeded")
    assert {len(stages[name]["attempts"]) for name in STAGES} == {1}
    assert stages["deploy"]["result"]["answer"].strip()
