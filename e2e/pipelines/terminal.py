"""The command line in a process, as a user of a cluster runs it."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testcluster.kube_namespace import KubeNamespace

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Terminal:
    """Runs the command line with a kubeconfig, in the namespace of the test."""

    namespace: KubeNamespace
    folder: Path
    kubeconfig: Path | None = None
    """Absent: the kubeconfig of the cluster's administrator."""

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command without waiting for its end."""
        path = os.pathsep.join(str(ROOT / part) for part in ("operator", "trainer"))
        variables = {
            "KUBECONFIG": str(
                (self.kubeconfig or self.namespace.kube.kubeconfig).absolute()
            ),
            "PYTHONPATH": path,
            "HOME": str(self.folder),
        }
        command = [
            sys.executable,
            "-m",
            "finetune_cli",
            *arguments,
            "-n",
            self.namespace.name,
        ]
        return subprocess.Popen(
            command,
            env={**os.environ, **variables},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self, *arguments: str, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        with self.start(*arguments) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            finally:
                process.kill()
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def output(self, *arguments: str) -> str:
        """Run a command that must succeed and return its stdout; raises AssertionError with its output."""
        completed = self.run(*arguments)
        if completed.returncode:
            raise AssertionError(completed.stdout + completed.stderr)
        return completed.stdout

    def plan(self, target: str) -> dict[str, Any]:
        """Run `plan --json` for a file or a pipeline, and return its stages by name."""
        stages = json.loads(self.output("plan", "--json", target))["stages"]
        return {stage["stage"]: stage for stage in stages}

    def write(self, manifest: dict[str, Any]) -> str:
        """Write a manifest and return the file's name."""
        file = self.folder / "manifest.json"
        file.write_text(json.dumps(manifest))
        return file.name
