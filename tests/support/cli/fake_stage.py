"""A stage that needs only the standard library: counts steps, saves checkpoints, handles SIGTERM, follows the contract.

It represents a user's own container. Environment: STEPS, STEP_SECONDS, SAVE_EVERY, EXIT_AT (step:code, once).
"""

import json
import os
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

config = json.loads(os.environ["FINETUNE_CONFIG"])
stage = config["stage"]
identity = config["identity"]
folder = Path(os.environ["FINETUNE_WORKSPACE"]) / stage / identity
folder.mkdir(parents=True, exist_ok=True)
steps = int(os.environ.get("STEPS", "10"))
save_every = int(os.environ.get("SAVE_EVERY", "4"))
stop_requested = False


def request_stop(signal_number: int, frame: object) -> None:
    global stop_requested  # noqa: PLW0603  a signal handler can only set a global
    stop_requested = True


signal.signal(signal.SIGTERM, request_stop)
with (folder / "starts").open("a") as starts:
    starts.write(
        f"{os.getpid()} {'again' if (folder / 'result.json').exists() else 'work'}\n"
    )


def replace(path: Path, value: object) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)


def end(message: dict[str, object], code: int) -> None:
    Path(os.environ["FINETUNE_TERMINATION_LOG"]).write_text(json.dumps(message))
    sys.exit(code)


RESULTS: dict[str, dict[str, Any]] = {
    "prepare": {
        "records": 1,
        "invalid": 0,
        "truncated": 0,
        "dropped": 0,
        "trainRows": 1,
        "validationRows": 0,
        "trainTokens": 1,
        "dataDigest": "sha256:0",
    },
    "train": {
        "steps": steps,
        "loss": 1.0,
        "validationLoss": 1.0,
        "bestStep": steps,
        "tokens": 1,
    },
    "evaluate": {
        "scores": {
            "task": {
                "acc": {"value": float(os.environ.get("SCORE", "0.9")), "stderr": 0.01}
            }
        }
    },
    "push": {
        "published": [
            {"target": target["uri"], **target, "digest": "sha256:0", "size": 1}
            for target in config["recipe"].get("targets", ())
        ]
    },
    "deploy": {"url": "http://127.0.0.1", "answer": "yes", "secondsToReady": 0.1},
}
result = {
    "stage": stage,
    "identity": identity,
    "digest": f"sha256:{identity}",
    **RESULTS[stage],
}
state = folder / "state.json"
if (folder / "result.json").exists():
    reuse = {"stage": stage, "step": 0, "reused": True}
    reuse["updatedAt"] = datetime.now(UTC).isoformat()
    replace(Path(os.environ["FINETUNE_PROGRESS_FILE"]), reuse)
    end({"result": result}, 0)
begin = json.loads(state.read_text()) if state.exists() else 0
saved = begin
for step in range(begin, steps + 1):
    progress = {
        "stage": stage,
        "step": step,
        "total": steps,
        "startStep": begin,
        "savedStep": saved,
        "stepSeconds": 0.01,
    }
    replace(
        Path(os.environ["FINETUNE_PROGRESS_FILE"]),
        {**progress, "updatedAt": datetime.now(UTC).isoformat()},
    )
    if stop_requested or (step % save_every == 0 and step > begin):
        replace(state, step)
        saved = step
    if stop_requested:
        end({"interruption": {"step": step, "savedStep": step}}, 75)
    at, _, code = os.environ.get("EXIT_AT", "-1:0").partition(":")
    if step == int(at) and not (folder / "failed").exists():
        (folder / "failed").touch()
        end({"failure": {"message": f"made to fail at step {step}"}}, int(code))
    time.sleep(float(os.environ.get("STEP_SECONDS", "0.01")))
replace(folder / "result.json", result)
end({"result": result}, 0)
