"""Create and inspect a pipeline on a cluster; its stages are a shell script that implements the stage contract."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from testcluster.images.image_layers import TOOLBOX
from testcluster.kube_namespace import KubeNamespace, until

Object = dict[str, Any]
ORDER = ("prepare", "train", "evaluate", "push")
# The stage contract in busybox: counts steps of 0.2 s, stores the count in the workspace on SIGTERM, resumes from it.
# The file /tmp/finish ends it early.
SCRIPT = r"""
identity=${FINETUNE_CONFIG#*\"identity\":\"}; identity=${identity%%\"*}
folder=$FINETUNE_WORKSPACE/$STAGE/$identity; mkdir -p "$folder"
i=$(cat "$folder/step" 2>/dev/null || echo 0)
echo "$HOSTNAME from $i" >> "$folder/log"
report() { printf "%s" "$1" > "$FINETUNE_TERMINATION_LOG"; }
trap 'echo $i > "$folder/step"; report "{\"interruption\":{\"step\":$i,\"savedStep\":$i}}"; exit 75' TERM
while [ "$i" -lt "${STEPS:-1}" ] && [ ! -e /tmp/finish ]; do sleep 0.2 & wait $!; i=$((i+1)); done
echo $i > "$folder/step"
if [ -n "$FAIL_WITH" ]; then report '{"failure":{"message":"FAIL_WITH is set"}}'; exit "$FAIL_WITH"; fi
report "{\"result\":{\"stage\":\"$STAGE\",\"identity\":\"$identity\",\"digest\":\"sha256:$identity\",$RESULT}}"
"""
RESULTS = {
    "prepare": '"records":1,"invalid":0,"truncated":0,"dropped":0,"trainRows":1,"validationRows":0,"trainTokens":1,'
    '"dataDigest":"sha256:0"',
    "train": '"steps":1,"loss":1.0,"bestStep":1,"tokens":1',
    "evaluate": '"scores":{"exam":{"acc":{"value":0.9,"stderr":0.01}}}',
    "push": '"published":[{"target":"pvc://models/x","uri":"pvc://models/x","format":"Merged","digest":"sha256:0",'
    '"size":1}]',
}


def stage(name: str, *, steps: int = 1) -> Object:
    """Return the spec of a stage that runs the script."""
    return {
        "pod": {
            "image": TOOLBOX,
            "command": ["sh", "-c", SCRIPT],
            "env": variables(name, STEPS=str(steps)),
            "nodeSelector": {"kubernetes.io/os": "linux"},
            "resources": memory("32Mi"),
        }
    }


def variables(stage_name: str, **more: str) -> list[Object]:
    """Return the environment variables of the script for a stage, and more; the script makes one step without STEPS."""
    values = {"STAGE": stage_name, "RESULT": RESULTS[stage_name], **more}
    return [{"name": name, "value": value} for name, value in values.items()]


def memory(size: str) -> Object:
    """Return the resources of a container with this memory as request and limit, and little CPU."""
    return {"requests": {"cpu": "10m", "memory": size}, "limits": {"memory": size}}


def pipeline(
    name: str,
    *,
    steps: dict[str, int] | None = None,
    pushes: bool = False,
    **changes: Any,
) -> Object:
    """Return a manifest of scripted stages; `changes` are fields of the spec, merged into the fields of each stage.

    Lists are replaced, as in a merge patch. So `env` must be complete: `variables` returns the `env` of a stage.
    `steps` sets the number of steps by stage. `pushes` adds the push stage, which needs the claim `models`.
    """
    stages = {name: stage(name, steps=(steps or {}).get(name, 1)) for name in ORDER}
    stages["evaluate"]["tasks"] = [{"name": "exam"}]
    stages["push"]["targets"] = [{"uri": "pvc://models/x"}]
    spec: Object = {
        "model": {"uri": "hf://org/base"},
        "datasets": [{"uri": "hf://org/data/train.jsonl"}],
        "workspace": {"size": "1Gi"},
        **stages,
    }
    if not pushes:
        del spec["push"]
    for key, value in changes.items():
        spec[key] = merged(spec.get(key), value)
    if "existingClaim" in spec["workspace"]:
        # Refused beside it.
        del spec["workspace"]["size"]
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTunePipeline",
        "metadata": {"name": name},
        "spec": {key: value for key, value in spec.items() if value is not None},
    }


def merged(old: Any, new: Any) -> Any:
    """Return the old value with the new value merged into it: objects field by field, and everything else replaced."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {**old, **{key: merged(old.get(key), value) for key, value in new.items()}}


@dataclass(frozen=True)
class PipelineDriver:
    """A test's handle of a pipeline on a cluster."""

    namespace: KubeNamespace
    name: str

    @classmethod
    def start(cls, namespace: KubeNamespace, manifest: Object) -> PipelineDriver:
        """Apply a manifest, and return the driver of its pipeline."""
        namespace.run("apply", "-f", "-", given=json.dumps(manifest))
        return cls(namespace, manifest["metadata"]["name"])

    def patch(self, **spec: Any) -> None:
        """Merge fields into the spec; None removes a field."""
        self.namespace.run(
            "patch", "ft", self.name, "--type=merge", "-p", json.dumps({"spec": spec})
        )

    def annotate(self, verb: str, value: str) -> None:
        """Set the annotation finetune.dev/VERB, as `cancel` and `retry` do."""
        self.namespace.run(
            "annotate", "ft", self.name, f"finetune.dev/{verb}={value}", "--overwrite"
        )

    @property
    def object(self) -> Object:
        """The pipeline as the API server returns it; empty if there is none."""
        return self.namespace.get("ft", self.name)

    @property
    def status(self) -> Object:
        """The pipeline's status, with its stages by name; empty before the operator has written a status."""
        status: Object = self.object.get("status", {})
        return status and {
            **status,
            "stages": {stage["name"]: stage for stage in status.get("stages", ())},
        }

    def stage(self, name: str) -> Object:
        """Return the status of a stage; empty if there is none."""
        status: Object = self.status.get("stages", {}).get(name, {})
        return status

    def condition(self, kind: str) -> Object:
        """Return a condition; empty if it is absent."""
        conditions = self.status.get("conditions", [])
        for condition in conditions:
            if condition["type"] == kind:
                return dict(condition)
        return {}

    def describe(self) -> str:
        """Return `kubectl describe` of the pipeline and the objects of its namespace, for failure messages."""
        return self.namespace.run("describe", "ft", self.name) + self.namespace.run(
            "get", "pods,jobs,pvc,events"
        )

    def until(self, predicate: Any, seconds: float = 60) -> Any:
        """Wait until the predicate returns a true value, and return it; raises TimedOut with `describe`."""
        return until(predicate, seconds, self.describe)

    def wait_state(self, stage_name: str, *states: str, seconds: float = 60) -> Object:
        """Wait until a stage is in one of the states; return the stage's status."""
        self.until(lambda: self.stage(stage_name).get("state") in states, seconds)
        return self.stage(stage_name)

    def wait_finished(self, phase: str = "Succeeded", seconds: float = 90) -> Object:
        """Wait until the current spec and annotations have finished, check the phase, and return the status."""
        self.until(self._has_finished, seconds)
        assert self.status["phase"] == phase, self.describe()
        return self.status

    def _has_finished(self) -> bool:
        snapshot = (
            self.object
        )  # read once: two reads could mix the states of two moments
        meta = snapshot["metadata"]
        status = snapshot.get("status", {})
        wanted = {
            verb: meta.get("annotations", {}).get(f"finetune.dev/{verb}")
            for verb in ("retry", "cancel")
        }
        observed = all(
            status.get("observedAnnotations", {}).get(verb) == value
            for verb, value in wanted.items()
        )
        current = observed and status.get("observedGeneration") == meta["generation"]
        true = {
            condition["type"]
            for condition in status.get("conditions", [])
            if condition["status"] == "True"
        }
        return current and "Finished" in true

    def jobs(self, stage_name: str | None = None) -> list[Object]:
        """Return the Jobs that the pipeline owns, of one stage or of all."""
        selector = (
            f"finetune.dev/stage={stage_name}"
            if stage_name
            else "app.kubernetes.io/managed-by=finetune-operator"
        )
        jobs = json.loads(
            self.namespace.run("get", "jobs", "-l", selector, "-o", "json")
        )["items"]
        uid = self.object["metadata"]["uid"]
        return [
            job for job in jobs if job["metadata"]["ownerReferences"][0]["uid"] == uid
        ]

    def pod(self, stage_name: str) -> str:
        """Wait until the pod of a stage's latest attempt exists; return it as `pod/NAME`."""
        job = self.stage(stage_name)["attempts"][-1]["job"]
        selector = f"batch.kubernetes.io/job-name={job}"
        return str(
            until(
                lambda: self.namespace.run(
                    "get", "pods", "-l", selector, "-o", "name"
                ).strip(),
                30,
                self.describe,
            )
        )

    def finish(self, stage_name: str) -> None:
        """End the running process of a stage successfully at its next step."""
        self.namespace.run(
            "exec", self.pod(stage_name), "--", "busybox", "touch", "/tmp/finish"
        )


def evict(namespace: KubeNamespace, pod: str) -> None:
    """Evict a pod through the Eviction API."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    path = f"/api/v1/namespaces/{namespace.name}/pods/{pod}/eviction"
    namespace.kube.run("create", "--raw", path, "-f", "-", given=json.dumps(body))
