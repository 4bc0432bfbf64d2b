"""The CLI in a temporary folder with a manifest, whose stages run `fake_stage.py` instead of the trainer."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

FAKE_STAGE = Path(__file__).with_name("fake_stage.py")
STAGES = ("prepare", "train", "evaluate", "push", "deploy")


def variables(**values: str) -> list[dict[str, str]]:
    """Return environment variables as in a pod."""
    return [{"name": name, "value": value} for name, value in values.items()]


class CliWorkspace:
    """A folder with a manifest, `pvc://demo` in `material/` and the work folder `run/`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_folder = folder / "run"
        (folder / "material").mkdir()
        shutil.copy(FAKE_STAGE, folder / "stage.py")
        program: dict[str, Any] = {
            "pod": {
                "command": [sys.executable, "stage.py"],
                "env": variables(STEPS="8", STEP_SECONDS="0.01"),
            },
        }
        self.manifest: dict[str, Any] = {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "FineTunePipeline",
            "metadata": {"name": "demo"},
            "spec": {
                "model": {"uri": "pvc://demo/base"},
                "datasets": [{"uri": "pvc://demo/data.jsonl"}],
                "prepare": {**program},
                "train": {**program},
                "evaluate": {
                    **program,
                    "tasks": [{"name": "task"}],
                    "gates": [{"task": "task", "value": 0.5}],
                },
                "push": {**program, "targets": [{"uri": "pvc://demo/out"}]},
                "deploy": {**program},
            },
        }

    def set_env(self, stage: str, **changes: str) -> None:
        """Set environment variables of a stage in the manifest."""
        pod = self.manifest["spec"][stage]["pod"]
        before = {variable["name"]: variable["value"] for variable in pod["env"]}
        self.manifest["spec"][stage]["pod"] = {
            **pod,
            "env": variables(**before | changes),
        }

    def command(self, verb: str, *arguments: str) -> list[str]:
        """Write the manifest and return the command line of a verb."""
        (self.folder / "p.yaml").write_text(yaml.safe_dump(self.manifest))
        manifest = ["p.yaml"] if verb in {"run", "retry", "plan"} else []
        claim = ["--claim", "demo=material"] if manifest else []
        return [
            sys.executable,
            "-m",
            "finetune_cli",
            verb,
            *arguments,
            *manifest,
            "--workdir",
            "run",
            *claim,
        ]

    def start_run(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `finetune run` without waiting for its end."""
        return subprocess.Popen(
            self.command("run", *arguments),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finetune(self, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a verb of the CLI to its end."""
        return self._run(self.command(verb, *arguments))

    def finetune_in(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the CLI with these arguments alone."""
        return self._run([sys.executable, "-m", "finetune_cli", *arguments])

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    @property
    def status(self) -> dict[str, Any]:
        """The pipeline's status in pipeline.json, with its stages by name."""
        status: dict[str, Any] = json.loads(
            (self.run_folder / "pipeline.json").read_text()
        )["status"]
        return status | {
            "stages": {stage["name"]: stage for stage in status.get("stages", ())}
        }

    def starts(self, stage: str) -> list[str]:
        """Return an entry for each process of a stage: `work`, or `again` if it found a result and only repeated it."""
        files = sorted(self.run_folder.glob(f"volumes/workspace/{stage}/*/starts"))
        return [
            line.split()[1] for file in files for line in file.read_text().splitlines()
        ]

    def processes(self) -> list[str]:
        """Return the command lines of all processes of this machine that belong to this run."""
        commands = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                command = " ".join(
                    (entry / "cmdline").read_bytes().decode().split("\0")
                )
                environ = (entry / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue  # the process has ended
            if (
                str(self.run_folder) in command
                or f"FINETUNE_WORKSPACE={self.run_folder}" in environ
            ):
                commands.append(command)
        return commands

    def wait_for_processes(self) -> None:
        """Wait until no process of this run is left, at most 20 s."""
        deadline = time.monotonic() + 20
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
