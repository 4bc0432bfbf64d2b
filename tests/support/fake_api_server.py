"""A small API server of pipelines that live in memory clusters: enough of Kubernetes for the command line."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml
from pydantic import ValidationError
from support.pods import a_job, a_pod, ended, made_by, over, running
from support.scenario import Scenario, merged

from finetune_operator.api.spec import PipelineSpec
from finetune_operator.core.observation import JobState
from finetune_operator.core.pipeline import Key
from finetune_operator.kubernetes.resources.server import SERVING_ANNOTATION
from finetune_operator.memory import MemoryJob, StoredPipeline

Object = dict[str, Any]
PIPELINES = "finetunepipelines"


class FakeApiServer:
    """What it keeps, and how it misbehaves."""

    def __init__(self) -> None:
        self.scenarios: dict[Key, Scenario] = {}
        self.gone: set[str] = set()
        """Jobs whose pods are no more."""
        self.nodes: dict[str, str] = {}
        self.logs: dict[str, list[str]] = {}
        """Job -> what its process has written."""
        self.cuts: list[str] = []
        """Jobs whose log's connection breaks once, after its first line."""
        self.forbidden: set[tuple[str, str]] = set()
        """Verb and resource."""
        self.installed = True
        self.missing: set[str] = set()
        """Namespaces that are not there."""
        self.last_applied: dict[Key, Object] = {}
        self.admission = ""
        """What a webhook has against any change."""
        self.asked: list[str] = []
        self.busy = 0
        """So many answers are 503."""

    def add(self, scenario: Scenario, namespace: str = "team") -> Scenario:
        """Take a pipeline in."""
        self.scenarios[Key(namespace, scenario.key.name)] = scenario
        return scenario

    def pipeline(self, key: Key) -> Object:
        """Give the object."""
        scenario = self.scenarios[key]
        stored: StoredPipeline = scenario.cluster.pipelines[scenario.key]
        notes = dict(stored.annotations)
        if key in self.last_applied:
            notes["kubectl.kubernetes.io/last-applied-configuration"] = json.dumps(self.last_applied[key])
        return {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "FineTunePipeline",
            "metadata": {
                "name": key.name,
                "namespace": key.namespace,
                "uid": stored.uid,
                "generation": stored.generation,
                "resourceVersion": str(stored.version),
                "annotations": notes,
                "managedFields": [{"manager": "somebody", "operation": "Apply"}],
            },
            "spec": json.loads(stored.spec),
            "status": json.loads(stored.status),
        }

    def patched(self, key: Key, body: Object, query: dict[str, str], kind: str) -> Object:
        """Change a pipeline, or say what it would be; raises Refusal."""
        if self.admission:
            raise Rejection(422, "Invalid", self.admission)
        if key.namespace in self.missing:
            raise Rejection(404, "NotFound", f'namespaces "{key.namespace}" not found')
        known = key in self.scenarios
        before = self.pipeline(key) if known else {"metadata": {"uid": "dry", "generation": 1}, "spec": {}}
        whole = kind.startswith("application/apply") or not known
        spec = body.get("spec", {}) if whole else merged(before["spec"], body.get("spec", {}))
        try:
            read = PipelineSpec.model_validate(spec)
        except ValidationError as error:
            raise Rejection(422, "Invalid", f"spec: {error.errors()[0]['msg']}") from error
        if query.get("dryRun"):
            meta = {**before["metadata"], "name": key.name, "namespace": key.namespace}
            return {**before, "metadata": meta, "spec": spec}
        scenario = self.scenarios[key]
        scenario.cluster.edit(scenario.key, read)
        for name, value in body.get("metadata", {}).get("annotations", {}).items():
            scenario.cluster.annotate(scenario.key, name, value)
        scenario.reconcile_until_stable()
        return self.pipeline(key)

    def job(self, namespace: str, name: str) -> Object | None:
        """Give a Job."""
        found = self._jobs(namespace).get(name)
        if found is None:
            return None
        conditions = {JobState.COMPLETE: [over("Complete")], JobState.FAILED: [over("Failed")]}
        return a_job(*conditions.get(found.observed.state, []), name=name, ownerReferences=[{"uid": found.owner}])

    def deployment(self, namespace: str, name: str) -> Object | None:
        """Give the Deployment of an attempt that starts a server, while it starts."""
        found = self._jobs(namespace).get(name)
        if found is None or not (found.live and found.template.serving):
            return None
        said = {SERVING_ANNOTATION: json.dumps(asdict(found.template.serving))}
        labels, owners = found.template.labels, [{"uid": found.owner}]
        made = a_job(name=name, labels=labels, annotations=said, ownerReferences=owners)
        return {**made, "spec": {"replicas": 1}, "status": {}}

    def pods(self, namespace: str) -> Iterator[Object]:
        """Give all pods that are left."""
        for name, job in self._jobs(namespace).items():
            if name not in self.gone:
                yield self._pod(namespace, name, job)

    def _jobs(self, namespace: str) -> dict[str, MemoryJob]:
        return {
            name: job
            for key, scenario in self.scenarios.items()
            if key.namespace == namespace
            for name, job in scenario.cluster.jobs.items()
        }

    def _pod(self, namespace: str, name: str, job: MemoryJob) -> Object:
        match job.observed.state:
            case JobState.WAITING:
                pod = a_pod(None, phase="Pending")
            case JobState.RUNNING:
                pod = a_pod(running())
            case JobState.COMPLETE | JobState.FAILED:
                good = job.observed.state is JobState.COMPLETE
                pod = a_pod(ended(job.observed.exit_code or 0), phase="Succeeded" if good else "Failed")
        pod["metadata"] |= {"name": f"{name}-xyz", "namespace": namespace, "uid": f"uid-{name}"}
        pod["metadata"]["ownerReferences"] = [made_by("Job", name)]
        pod["metadata"]["labels"] = {**job.template.labels, "batch.kubernetes.io/job-name": name}
        pod["spec"]["nodeName"] = self.nodes.get(name, "spot-1") if job.observed.started_at else ""
        return pod


class Rejection(Exception):
    """An answer that is none."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class _Handler(BaseHTTPRequestHandler):
    server: "_Server"
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("GET")

    def do_PATCH(self) -> None:
        self._answer("PATCH")

    def _answer(self, method: str) -> None:
        api, url = self.server.api, urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        api.asked.append(f"{method} {self.path}")
        try:
            self._check()
            where = [part for part in url.path.split("/") if part]
            found = self._found(method, where, dict(parse_qsl(url.query)), json.loads(body) if body else {})
        except Rejection as refusal:
            self._say({"kind": "Status", "reason": refusal.reason, "message": str(refusal)}, refusal.status)
        else:
            if found is not None:
                self._say(found, 200)

    def _check(self) -> None:
        api = self.server.api
        if api.busy:
            api.busy -= 1
            raise Rejection(503, "ServiceUnavailable", "not now")
        if self.headers.get("Authorization") != "Bearer sesame":
            raise Rejection(401, "Unauthorized", "Unauthorized")

    def _found(self, method: str, where: list[str], query: dict[str, str], body: Object) -> Object | None:
        group, rest = (where[1], where[3:]) if where[0] == "apis" else ("", where[2:])
        namespace, rest = (rest[1], rest[2:]) if rest[0] == "namespaces" else ("", rest)
        plural, name, below = (*rest, "", "")[:3]
        self._allow(method, group, plural, name, namespace)
        match plural, name, below:
            case "finetunepipelines", "", "":
                keys = [key for key in sorted(self.server.api.scenarios) if namespace in {"", key.namespace}]
                return _listed([self.server.api.pipeline(key) for key in keys])
            case "finetunepipelines", _, "":
                return self._pipeline(method, Key(namespace, name), query, body)
            case "jobs" | "deployments", _, "":
                found = self.server.api.job if plural == "jobs" else self.server.api.deployment
                if child := found(namespace, name):
                    return child
            case "pods", "", "":
                label, _, value = query["labelSelector"].partition("=")
                pods = self.server.api.pods(namespace)
                return _listed([pod for pod in pods if pod["metadata"]["labels"].get(label) == value])
            case "pods", _, "log":
                self._log(name.removesuffix("-xyz"), query)
                return None
            case "events", "", "":
                return _listed([])
        raise Rejection(404, "NotFound", f'{plural} "{name}" not found')

    def _allow(self, method: str, group: str, plural: str, name: str, namespace: str) -> None:
        api = self.server.api
        if plural == PIPELINES and not api.installed:
            raise Rejection(404, "", "404 page not found")
        verb = "patch" if method == "PATCH" else "get" if name else "list"
        if (verb, plural) in api.forbidden:
            where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
            words = f'{plural}.{group} "{name}" is forbidden: User "bob" cannot {verb} resource "{plural}" '
            raise Rejection(403, "Forbidden", f'{words}in API group "{group}" {where}')

    def _pipeline(self, method: str, key: Key, query: dict[str, str], body: Object) -> Object:
        api = self.server.api
        if method == "PATCH" and (key in api.scenarios or query.get("dryRun")):
            return api.patched(key, body, query, self.headers["Content-Type"])
        if key in api.scenarios and api.scenarios[key].key in api.scenarios[key].cluster.pipelines:
            return api.pipeline(key)
        raise Rejection(404, "NotFound", f'{PIPELINES}.finetune.dev "{key.name}" not found')

    def _log(self, job: str, query: dict[str, str]) -> None:
        """Write what there is and, when it is followed, what comes, until the process has ended."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        told, until = 0, time.monotonic() + 20
        while time.monotonic() < until:
            alive = query.get("follow") == "true" and self._runs(job)
            lines = self.server.api.logs.get(job, [])
            for number, line in enumerate(lines[told:], told):
                self._chunk(f"2030-01-01T00:00:{number // 2:02}.{number:09}Z {line}\n".encode())
                if job in self.server.api.cuts:
                    self.server.api.cuts.remove(job)
                    self.close_connection = True
                    return
            told = len(lines)
            if not alive:
                break
            time.sleep(0.02)
        self._chunk(b"")

    def _chunk(self, text: bytes) -> None:
        self.wfile.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")

    def _runs(self, job: str) -> bool:
        found = [
            scenario.cluster.jobs[job]
            for scenario in self.server.api.scenarios.values()
            if job in scenario.cluster.jobs
        ]
        return bool(found) and found[0].live

    def _say(self, answer: Object, status: int) -> None:
        plain = status == 404 and not answer["reason"]
        text = answer["message"].encode() if plain else json.dumps(answer, sort_keys=True).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def _listed(items: list[Object]) -> Object:
    return {"metadata": {}, "items": items}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, api: FakeApiServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.api = api


@contextmanager
def serving() -> Iterator[tuple[FakeApiServer, str]]:
    """Have one for a while, and its URL."""
    api = FakeApiServer()
    server = _Server(api)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield api, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timedelta(seconds=5).total_seconds())


def kubeconfig(url: str, **namespaces: str | None) -> str:
    """Write one with a context for each, the first being current; and one whose server is not there."""
    contexts = [
        {"name": name, "context": {"cluster": "it", "user": "me", **({"namespace": space} if space else {})}}
        for name, space in namespaces.items()
    ]
    contexts.append({"name": "dead", "context": {"cluster": "nothing", "user": "me"}})
    contexts.append({"name": "stranger", "context": {"cluster": "it", "user": "nobody"}})
    servers = {"it": url, "nothing": "http://127.0.0.1:1"}
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": contexts[0]["name"],
            "contexts": contexts,
            "clusters": [{"name": name, "cluster": {"server": server}} for name, server in servers.items()],
            "users": [{"name": "me", "user": {"token": "sesame"}}, {"name": "nobody", "user": {"token": "x"}}],
        }
    )
