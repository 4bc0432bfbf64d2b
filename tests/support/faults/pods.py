"""Pods of the operator as the simulated kubelet sees them, and the statuses that it writes: pure."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from support.operator.scenario import RESULTS

from finetune_trainer.contract import TerminationMessage

Object = dict[str, Any]
STAGE_LABEL = "finetune.dev/stage"
IDENTITY_LABEL = "finetune.dev/identity"
ATTEMPT_LABEL = "finetune.dev/attempt"
SERVER_LABEL = "finetune.dev/server"
JOB_LABEL = "batch.kubernetes.io/job-name"
CONTAINER = "stage"
INTERRUPTED = 75


@dataclass(frozen=True)
class StagePod:
    """A pod of an attempt or of a server."""

    raw: Object

    @property
    def namespace(self) -> str:
        """The namespace."""
        return str(self.raw["metadata"]["namespace"])

    @property
    def name(self) -> str:
        """The name."""
        return str(self.raw["metadata"]["name"])

    @property
    def uid(self) -> str:
        """The uid."""
        return str(self.raw["metadata"]["uid"])

    @property
    def path(self) -> str:
        """The path of the object."""
        return f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"

    def label(self, name: str) -> str:
        """Return a label; empty if the pod does not have it."""
        return str(self.raw["metadata"].get("labels", {}).get(name, ""))

    @property
    def stage(self) -> str:
        """The stage."""
        return self.label(STAGE_LABEL)

    @property
    def identity(self) -> str:
        """The identity of the result."""
        return self.label(IDENTITY_LABEL)

    @property
    def attempt(self) -> int:
        """The number of the attempt."""
        return int(self.label(ATTEMPT_LABEL) or 0)

    @property
    def is_server(self) -> bool:
        """Whether the pod serves a model."""
        return bool(self.label(SERVER_LABEL))

    @property
    def job_stem(self) -> str:
        """The name of its Job without the attempt: it has the pipeline's name, the start of its uid and the stage."""
        return self.label(JOB_LABEL).rpartition("-a")[0]

    @property
    def is_being_deleted(self) -> bool:
        """Whether the pod has been deleted and may still run."""
        return "deletionTimestamp" in self.raw["metadata"]

    @property
    def workspace(self) -> str | None:
        """The claim that the pod mounts as its workspace; a server mounts none."""
        for volume in self.raw["spec"].get("volumes", []):
            if volume["name"] == "workspace":
                return str(volume["persistentVolumeClaim"]["claimName"])
        return None

    def environment(self, name: str) -> str:
        """Return a variable of the stage's container; empty if it is not set."""
        for container in self.raw["spec"]["containers"]:
            for variable in container.get("env", []):
                if container["name"] == CONTAINER and variable["name"] == name:
                    return str(variable.get("value", ""))
        return ""


@dataclass(frozen=True)
class Ending:
    """How the process of a pod ends."""

    exit_code: int
    message: str = ""


Behaviour = Callable[[StagePod], Awaitable[Ending]]
"""What the process of a pod does until it ends; it is cancelled when the pod is deleted."""


def succeeded(pod: StagePod) -> Ending:
    """Return the end of a stage with a valid result."""
    result = {
        "stage": pod.stage,
        "identity": pod.identity,
        "digest": f"sha256:{pod.stage}-{pod.identity}",
        **RESULTS[pod.stage],
    }
    message = TerminationMessage.model_validate({"result": result})
    return Ending(0, message.model_dump_json(by_alias=True, exclude_none=True))


def interrupted() -> Ending:
    """Return the end of a process that has saved its state on SIGTERM."""
    return Ending(INTERRUPTED, '{"interruption":{"step":3,"savedStep":3}}')


def failed(exit_code: int) -> Ending:
    """Return the end of a process that failed by its own fault."""
    return Ending(exit_code, '{"failure":{"message":"the test wants it"}}')


def now() -> str:
    """Return the time as Kubernetes writes it."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def running_status(pod: StagePod, address: str) -> Object:
    """Return a patch of the status of a pod whose containers have just started."""
    started = now()
    init = [
        {
            **_container(container, "true"),
            "state": {
                "terminated": {"exitCode": 0, "reason": "Completed", **_times(started)}
            },
        }
        for container in pod.raw["spec"].get("initContainers", [])
    ]
    containers = [
        {
            **_container(container, "true"),
            "started": True,
            "state": {"running": {"startedAt": started}},
        }
        for container in pod.raw["spec"]["containers"]
    ]
    return {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "startTime": started,
        "conditions": [
            _condition(kind, "True")
            for kind in ("Initialized", "ContainersReady", "Ready")
        ],
        "containerStatuses": containers,
        **({"initContainerStatuses": init} if init else {}),
    }


def ended_status(pod: StagePod, ending: Ending, started: str) -> Object:
    """Return a patch of the status of a pod whose process has ended."""
    reason = "Error" if ending.exit_code else "Completed"
    terminated = {
        "exitCode": ending.exit_code,
        "reason": reason,
        "message": ending.message,
        **_times(started),
    }
    containers = [
        {
            **_container(container, ""),
            "started": False,
            "state": {"terminated": terminated},
        }
        for container in pod.raw["spec"]["containers"]
    ]
    return {
        "phase": "Failed" if ending.exit_code else "Succeeded",
        "conditions": [
            _condition(kind, "False") for kind in ("ContainersReady", "Ready")
        ],
        "containerStatuses": containers,
    }


def _container(container: Object, ready: str) -> Object:
    image = container["image"]
    return {
        "name": container["name"],
        "image": image,
        "imageID": "",
        "restartCount": 0,
        "ready": bool(ready),
    }


def _times(started: str) -> Object:
    return {"startedAt": started, "finishedAt": now()}


def _condition(kind: str, status: str) -> Object:
    return {
        "type": kind,
        "status": status,
        "lastTransitionTime": now(),
    }
