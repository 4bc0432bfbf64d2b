"""A folder with a manifest in it, and the command line; the stages are a container that is not ours."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

FAKE = Path(__file__).with_name("fake_stage.py")
STAGES = ("prepare", "train", "evaluate", "push", "deploy")


class CliWorkspace:
    """A folder with a manifest in it, and the command line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_folder = folder / "run"
        (folder / "material").mkdir()
        shutil.copy(FAKE, folder / "stage.py")
        mine = {"command": [sys.executable, "stage.py"], "env": {"STEPS": "8", "STEP_SECONDS": "0.01"}}
        self.manifest: dict[str, Any] = {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "FineTunePipeline",
            "metadata": {"name": "desk"},
            "spec": {
                "model": {"uri": "pvc://demo/base"},
                "dataset": {"uri": "pvc://demo/data.jsonl"},
                "prepare": {**mine},
                "train": {**mine},
                "evaluate": {**mine, "tasks": {"task": {}}, "gate": {"task": "task", "threshold": 0.5}},
                "push": {**mine, "target": "pvc://demo/out"},
                "deploy": {**mine},
            },
        }

    def env(self, stage: str, **variables: str) -> None:
        spec = self.manifest["spec"][stage]
        spec["env"] = {**spec["env"], **variables}

    def command(self, verb: str, *arguments: str) -> list[str]:
        (self.folder / "p.yaml").write_text(yaml.safe_dump(self.manifest))
        file = ["p.yaml"] if verb in {"run", "retry", "plan"} else []
        claim = ["--claim", "demo=material"] if file else []
        return [sys.executable, "-m", "finetune_cli", verb, *arguments, *file, "--workdir", "run", *claim]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command("run", *arguments),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def do(self, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(verb, *arguments), cwd=self.folder, capture_output=True, text=True, timeout=120, check=False
        )

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run_folder / "pipeline.json").read_text())["status"]
        return found

    def starts(self, stage: str) -> list[str]:
        """What each process of a stage found: work, or a result that it only had to repeat."""
        files = sorted(self.run_folder.glob(f"volumes/workspace/{stage}/*/starts"))
        return [line.split()[1] for file in files for line in file.read_text().splitlines()]

    def processes(self) -> list[str]:
        """Every process of this machine that works for this desk."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                about = (entry / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if str(self.run_folder) in " ".join(words) or f"FINETUNE_WORKSPACE={self.run_folder}" in about:
                found.append(" ".join(words))
        return found

    def settle(self) -> None:
        """Wait until nothing of this desk runs any more."""
        until = time.monotonic() + 20
        while self.processes() and time.monotonic() < until:
            time.sleep(0.05)
