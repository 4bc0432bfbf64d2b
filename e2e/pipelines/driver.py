"""A pipeline as a test tells it: stages that are a shell script, and what has become of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from testcluster.images.packing import TOOLBOX
from testcluster.kube_namespace import KubeNamespace, until

Object = dict[str, Any]
ORDER = ("prepare", "train", "evaluate", "push")
# The stage contract in busybox: counts steps, remembers them in the workspace, saves when it is asked to stop.
SCRIPT = r"""
identity=${FINETUNE_CONFIG#*\"identity\":\"}; identity=${identity%%\"*}
folder=$FINETUNE_WORKSPACE/$STAGE/$identity; mkdir -p "$folder"
i=$(cat "$folder/step" 2>/dev/null || echo 0)
echo "$HOSTNAME from $i" >> "$folder/log"
say() { printf "%s" "$1" > "$FINETUNE_TERMINATION_LOG"; }
trap 'echo $i > "$folder/step"; say "{\"interruption\":{\"step\":$i,\"savedStep\":$i}}"; exit 75' TERM
while [ "$i" -lt "${STEPS:-1}" ]; do sleep 0.2 & wait $!; i=$((i+1)); done
echo $i > "$folder/step"
if [ -n "$FAIL_WITH" ]; then say '{"failure":{"message":"the script was told to fail"}}'; exit "$FAIL_WITH"; fi
say "{\"result\":{\"stage\":\"$STAGE\",\"identity\":\"$identity\",\"digest\":\"sha256:$identity\",$RESULT}}"
"""
RESULTS = {
    "prepare": '"records":1,"invalid":0,"truncated":0,"dropped":0,"trainRows":1,"validationRows":0,"trainTokens":1,'
    '"dataDigest":"sha256:0"',
    "train": '"steps":1,"loss":1.0,"bestStep":1,"tokens":1',
    "evaluate": '"scores":{"exam":{"acc":{"value":0.9,"stderr":0.01}}}',
    "push": '"uri":"pvc://models/x","size":1',
}


def stage(name: str, *, steps: int = 1, env: dict[str, str] | None = None, **more: Any) -> Object:
    """Write a stage that runs the script."""
    spec: Object = {
        "image": TOOLBOX,
        "command": ["sh", "-c", SCRIPT],
        "env": {"STAGE": name, "RESULT": RESULTS[name], "STEPS": str(steps), **(env or {})},
        "placement": {"nodeSelector": {"kubernetes.io/os": "linux"}},
        "resources": {"cpu": "10m", "memory": "32Mi"},
    }
    return {**spec, **more}


def pipeline(name: str, *, steps: dict[str, int] | None = None, pushes: bool = False, **changes: Any) -> Object:
    """Write a manifest of scripted stages; changes are fields of the spec, merged into each stage's own.

    With `pushes` the claim `models` has to be there.
    """
    stages = {one: stage(one, steps=(steps or {}).get(one, 1)) for one in ORDER}
    stages["evaluate"]["tasks"] = {"exam": {}}
    stages["push"]["target"] = "pvc://models/x"
    spec: Object = {
        "model": {"uri": "hf://org/base"},
        "dataset": {"uri": "hf://org/data/train.jsonl"},
        "workspace": {"size": "1Gi"},
        **stages,
    }
    if not pushes:
        del spec["push"]
    for key, value in changes.items():
        spec[key] = _merged(spec.get(key), value)
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTunePipeline",
        "metadata": {"name": name},
        "spec": {key: value for key, value in spec.items() if value is not None},
    }


def _merged(old: Any, new: Any) -> Any:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}


@dataclass(frozen=True)
class PipelineDriver:
    """One pipeline on a cluster."""

    namespace: KubeNamespace
    name: str

    @classmethod
    def start(cls, namespace: KubeNamespace, manifest: Object) -> PipelineDriver:
        """Apply a manifest."""
        namespace.run("apply", "-f", "-", given=json.dumps(manifest))
        return cls(namespace, manifest["metadata"]["name"])

    def change(self, **spec: Any) -> None:
        """Edit the spec; None removes."""
        self.namespace.run("patch", "ftp", self.name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def annotate(self, verb: str, value: str) -> None:
        """Ask for something once."""
        self.namespace.run("annotate", "ftp", self.name, f"finetune.dev/{verb}={value}", "--overwrite")

    @property
    def object(self) -> Object:
        """All of it."""
        return self.namespace.get("ftp", self.name)

    @property
    def status(self) -> Object:
        """What the operator says."""
        found: Object = self.object.get("status", {})
        return found

    def stage(self, name: str) -> Object:
        """What it says of one stage."""
        found: Object = self.status.get("stages", {}).get(name, {})
        return found

    def condition(self, kind: str) -> Object:
        """One condition; empty where it is not there."""
        return next((one for one in self.status.get("conditions", []) if one["type"] == kind), {})

    def told(self) -> str:
        """All that a person would look at."""
        return self.namespace.run("describe", "ftp", self.name) + self.namespace.run("get", "pods,jobs,pvc,events")

    def until(self, true: Any, seconds: float = 60) -> Any:
        """Wait until something is so, or fail with all that is known."""
        return until(true, seconds, self.told)

    def wait_state(self, stage_: str, *states: str, seconds: float = 60) -> Object:
        """Wait until a stage is in one of the states."""
        self.until(lambda: self.stage(stage_).get("state") in states, seconds)
        return self.stage(stage_)

    def wait_finished(self, phase: str = "Succeeded", seconds: float = 90) -> Object:
        """Wait until it has finished with all that was asked so far, and see how it ended."""
        self.until(self._has_finished, seconds)
        assert self.status["phase"] == phase, self.told()
        return self.status

    def _has_finished(self) -> bool:
        found = self.object  # once, or the answer would be put together from two moments
        meta, status = found["metadata"], found.get("status", {})
        asked = {verb: meta.get("annotations", {}).get(f"finetune.dev/{verb}") for verb in ("retry", "cancel")}
        obeyed = all(status.get("observedAnnotations", {}).get(verb) == value for verb, value in asked.items())
        current = obeyed and status.get("observedGeneration") == meta["generation"]
        ended = {one["type"] for one in status.get("conditions", []) if one["status"] == "True"}
        return current and "Finished" in ended

    def jobs(self, stage_: str | None = None) -> list[Object]:
        """Give its Jobs."""
        selector = f"finetune.dev/stage={stage_}" if stage_ else "app.kubernetes.io/managed-by=finetune-operator"
        found = json.loads(self.namespace.run("get", "jobs", "-l", selector, "-o", "json"))["items"]
        uid = self.object["metadata"]["uid"]
        return [job for job in found if job["metadata"]["ownerReferences"][0]["uid"] == uid]

    def pod(self, stage_: str) -> str:
        """Name the pod of a stage's newest attempt, once it is there."""
        job = self.stage(stage_)["attempts"][-1]["job"]
        selector = f"batch.kubernetes.io/job-name={job}"
        return str(
            until(lambda: self.namespace.run("get", "pods", "-l", selector, "-o", "name").strip(), 30, self.told)
        )
