"""A kubelet for pods without nodes: it writes the statuses of a real kubelet, with administrator rights."""

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any

from support.operator.scenario import a_result

from finetune_operator.core.metadata import COMPLETION_INDEX
from finetune_trainer.contract import TerminationMessage, parse_config
from testcluster.errors import TimedOut
from testcluster.kube_namespace import KubeNamespace, until

Object = dict[str, Any]
SERVER_ADDRESS = str(ip_address("127.1.0.0") + os.getpid() % 2**16)
"""Address of every simulated model server: pods without nodes have no network. Each test process has its own."""
SERVER_PORT = 8000
SELECTOR = "app.kubernetes.io/managed-by=finetune-operator"


@dataclass
class SimulatedKubelet:
    """Runs the pods of one namespace: stages succeed, and servers become ready."""

    namespace: KubeNamespace
    held: set[str] = field(default_factory=set)
    """Stages whose pods run on."""
    results: dict[str, Object] = field(default_factory=dict)
    """Stage -> changes of its usual result."""

    def sync(self) -> None:
        """Write the next status of each pod."""
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(self._sync_pod, self.pods()))

    def _sync_pod(self, pod: Object) -> None:
        name = pod["metadata"]["name"]
        stage = pod["metadata"]["labels"]["finetune.dev/stage"]
        starts = stage == "deploy" or stage in self.held
        if pod["metadata"].get("deletionTimestamp") or pod["status"]["phase"] in {
            "Succeeded",
            "Failed",
        }:
            return
        if not starts:
            self._write(name, _ended(pod, 0, self._termination_message(pod, stage)))
        elif not pod["status"].get("containerStatuses"):
            self._write(name, _started(is_server=stage == "deploy"))

    def pods(self, stage: str = "") -> list[Object]:
        """Return the pods of a stage, or of all stages."""
        selector = f"{SELECTOR},finetune.dev/stage={stage}" if stage else SELECTOR
        items: list[Object] = json.loads(
            self.namespace.run("get", "pods", "-l", selector, "-o", "json")
        )["items"]
        return items

    def running(self, stage: str, index: int = 0) -> list[Object]:
        """Return the running pods of a stage with this index; pods of a stage without indexes have the index 0."""
        running = (
            pod for pod in self.pods(stage) if pod["status"]["phase"] == "Running"
        )
        return [
            pod
            for pod in running
            if int(pod["metadata"]["labels"].get(COMPLETION_INDEX) or 0) == index
        ]

    def succeed(self, stage: str, index: int = 0) -> None:
        """End a running pod of a stage with a result."""
        [pod] = until(lambda: self.running(stage, index), 60)
        message = self._termination_message(pod, stage)
        self._write(pod["metadata"]["name"], _ended(pod, 0, message))

    def evict(self, stage: str, index: int = 0) -> None:
        """End a running pod of a held stage as an eviction does."""
        [pod] = until(lambda: self.running(stage, index), 60)
        disruption = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "EvictionByEvictionAPI",
        }
        ended = _ended(pod, 143, "", "Failed")
        conditions = [{**disruption, "lastTransitionTime": _now()}]
        self._write(pod["metadata"]["name"], {**ended, "conditions": conditions})

    def _termination_message(self, pod: Object, stage: str) -> str:
        identity = parse_config(_config(pod).replace("$$(", "$(")).identity
        result = a_result(stage, identity, **self.results.get(stage, {}))
        return TerminationMessage(result=result).model_dump_json(
            by_alias=True, exclude_none=True
        )

    def _write(self, pod: str, status: Object) -> None:
        patch = json.dumps({"status": status})
        try:
            self.namespace.run(
                "patch", "pod", pod, "--subresource=status", "--type=merge", "-p", patch
            )
        except TimedOut as error:
            if "NotFound" not in str(error):  # the pod may have been deleted meanwhile
                raise


@contextmanager
def simulated_kubelet(namespace: KubeNamespace) -> Iterator[SimulatedKubelet]:
    """Run the pods of the namespace, and answer prompts for all its servers, until the end of the context."""
    kubelet = SimulatedKubelet(namespace)
    stopped = threading.Event()
    errors: list[Exception] = []

    def run() -> None:
        while not stopped.wait(0.3):
            try:
                kubelet.sync()
            except Exception as error:  # noqa: BLE001  raised below, in the test's own thread
                errors.append(error)
                return

    with ThreadingHTTPServer((SERVER_ADDRESS, SERVER_PORT), _Server) as server:
        threads = [
            threading.Thread(target=run),
            threading.Thread(target=server.serve_forever),
        ]
        for thread in threads:
            thread.start()
        try:
            yield kubelet
        finally:
            stopped.set()
            server.shutdown()
            for thread in threads:
                thread.join()
    if errors:
        raise errors[0]


class _Server(BaseHTTPRequestHandler):
    """A model server that answers every prompt."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        content = json.dumps({"choices": [{"text": "hello"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def _started(*, is_server: bool) -> Object:
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": _now()}
        for kind in (
            ("PodScheduled", "Initialized", "ContainersReady", "Ready")
            if is_server
            else ("PodScheduled",)
        )
    ]
    return {
        "phase": "Running",
        "startTime": _now(),
        "conditions": conditions,
        "containerStatuses": [
            _container({"running": {"startedAt": _now()}}, ready=is_server)
        ],
        **(
            {
                "podIP": SERVER_ADDRESS,
                "podIPs": [{"ip": SERVER_ADDRESS}],
            }
            if is_server
            else {}
        ),
    }


def _ended(pod: Object, code: int, message: str, phase: str = "Succeeded") -> Object:
    started = [
        container["state"]["running"]["startedAt"]
        for container in pod["status"].get("containerStatuses", [])
    ]
    terminated = {
        "exitCode": code,
        "message": message,
        "startedAt": [*started, _now()][0],
        "finishedAt": _now(),
    }
    return {
        "phase": phase,
        "containerStatuses": [
            _container({"running": None, "terminated": terminated}, ready=False)
        ],
    }


def _container(state: Object, *, ready: bool) -> Object:
    return {
        "name": "stage",
        "image": "x",
        "imageID": "",
        "ready": ready,
        "restartCount": 0,
        "state": state,
    }


def _config(pod: Object) -> str:
    """Return the variable FINETUNE_CONFIG of the pod."""
    [container] = pod["spec"]["containers"]
    values = {
        variable["name"]: variable.get("value", "") for variable in container["env"]
    }
    return str(values["FINETUNE_CONFIG"])


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
