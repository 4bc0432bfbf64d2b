"""A fake API server over in-memory clusters, with the requests that the command line sends."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml
from pydantic import ValidationError
from support.pods import a_job, a_pod, controller_reference, job_condition, running, terminated
from support.scenario import Scenario, merged

from finetune_operator.api.spec import PipelineSpec
from finetune_operator.core.metadata import STAGE_CONTAINER
from finetune_operator.core.observation import JobState
from finetune_operator.core.pipeline import Key
from finetune_operator.kubernetes.resources.server import SERVING_ANNOTATION
from finetune_operator.memory import MemoryJob, StoredPipeline

Object = dict[str, Any]
PIPELINES = "finetunepipelines"


class FakeApiServer:
    """The objects that the server returns, and the errors that it injects."""

    def __init__(self) -> None:
        self.scenarios: dict[Key, Scenario] = {}
        self.deleted_pods: set[str] = set()
        """Jobs whose pods no longer exist."""
        self.nodes: dict[str, str] = {}
        """Job -> the node of its pod; spot-1 if absent."""
        self.logs: dict[str, list[str]] = {}
        """Job -> the lines that its process has written."""
        self.interrupted_logs: list[str] = []
        """Jobs whose log connection breaks once, after the first line."""
        self.kubelet_messages: dict[str, str] = {}
        """Job -> the message that the kubelet writes once in place of its log, without a timestamp."""
        self.on_eviction: Callable[[str, str], None] = lambda _job, _how: None
        """Called with the Job of a pod that was evicted (`evict`) or deleted (`kill`)."""
        self.disruption_budgets: list[str] = []
        """Messages of PodDisruptionBudgets that forbid every eviction."""
        self.admission_without_dry_run = False
        """Whether an admission webhook refuses requests with dryRun."""
        self.forbidden: set[tuple[str, str]] = set()
        """Verbs and resources that RBAC forbids."""
        self.installed = True
        """Whether the CRD is installed."""
        self.missing_namespaces: set[str] = set()
        self.last_applied: dict[Key, Object] = {}
        self.admission_error = ""
        """The message with which a webhook rejects every change."""
        self.requests: list[str] = []
        """Method and path of every request."""
        self.unavailable = 0
        """So many of the next responses are 503."""

    def add(self, scenario: Scenario, namespace: str = "team") -> Scenario:
        """Serve the pipeline of a scenario."""
        self.scenarios[Key(namespace, scenario.key.name)] = scenario
        return scenario

    def pipeline(self, key: Key) -> Object:
        """Return the pipeline object."""
        scenario = self.scenarios[key]
        stored: StoredPipeline = scenario.cluster.pipelines[scenario.key]
        annotations = dict(stored.annotations)
        if key in self.last_applied:
            annotations["kubectl.kubernetes.io/last-applied-configuration"] = json.dumps(
                self.last_applied[key]
            )
        return {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "FineTunePipeline",
            "metadata": {
                "name": key.name,
                "namespace": key.namespace,
                "uid": stored.uid,
                "generation": stored.generation,
                "resourceVersion": str(stored.version),
                "annotations": annotations,
                "managedFields": [{"manager": "flux", "operation": "Apply"}],
            },
            "spec": json.loads(stored.spec),
            "status": json.loads(stored.status),
        }

    def patch(self, key: Key, body: Object, query: dict[str, str], kind: str) -> Object:
        """Patch a pipeline and return it; with `dryRun`, return the patched object only. Raises ErrorResponse."""
        if self.admission_error:
            raise ErrorResponse(422, "Invalid", self.admission_error)
        if key.namespace in self.missing_namespaces:
            raise ErrorResponse(404, "NotFound", f'namespaces "{key.namespace}" not found')
        exists = key in self.scenarios
        before = (
            self.pipeline(key)
            if exists
            else {"metadata": {"uid": "dry", "generation": 1}, "spec": {}}
        )
        replaces = kind.startswith("application/apply") or not exists
        spec = body.get("spec", {}) if replaces else merged(before["spec"], body.get("spec", {}))
        try:
            parsed = PipelineSpec.model_validate(spec)
        except ValidationError as error:
            raise ErrorResponse(422, "Invalid", f"spec: {error.errors()[0]['msg']}") from error
        if query.get("dryRun"):
            meta = {**before["metadata"], "name": key.name, "namespace": key.namespace}
            return {**before, "metadata": meta, "spec": spec}
        scenario = self.scenarios[key]
        scenario.cluster.edit(scenario.key, parsed)
        for name, value in body.get("metadata", {}).get("annotations", {}).items():
            scenario.cluster.annotate(scenario.key, name, value)
        scenario.reconcile_until_stable()
        return self.pipeline(key)

    def job(self, namespace: str, name: str) -> Object | None:
        """Return a Job, or None if it does not exist."""
        job = self._jobs(namespace).get(name)
        if job is None:
            return None
        conditions = {
            JobState.COMPLETE: [job_condition("Complete")],
            JobState.FAILED: [job_condition("Failed")],
        }
        return a_job(
            *conditions.get(job.observed.state, []),
            name=name,
            ownerReferences=[{"uid": job.owner}],
        )

    def deployment(self, namespace: str, name: str) -> Object | None:
        """Return the Deployment of an attempt whose server is starting; None for all others."""
        job = self._jobs(namespace).get(name)
        if job is None or not (job.live and job.template.serving):
            return None
        annotations = {SERVING_ANNOTATION: json.dumps(asdict(job.template.serving))}
        labels = job.template.labels
        owners = [{"uid": job.owner}]
        job = a_job(name=name, labels=labels, annotations=annotations, ownerReferences=owners)
        return {**job, "spec": {"replicas": 1}, "status": {}}

    def pods(self, namespace: str) -> Iterator[Object]:
        """Yield all pods that exist in a namespace."""
        for name, job in self._jobs(namespace).items():
            if name not in self.deleted_pods:
                yield self._pod(namespace, name, job)

    def pod(self, namespace: str, name: str) -> Object:
        """Return a pod; raises ErrorResponse if it does not exist."""
        for pod in self.pods(namespace):
            if pod["metadata"]["name"] == name:
                return pod
        raise ErrorResponse(404, "NotFound", f'pods "{name}" not found')

    def progress(self, namespace: str, job: str) -> Object:
        """Return the report of a Job's process at /progress; raises ErrorResponse while it does not answer."""
        report = self._jobs(namespace)[job].observed.progress
        if report is None:
            raise ErrorResponse(
                503, "ServiceUnavailable", "error trying to reach service: connection refused"
            )
        progress: Object = json.loads(report.model_dump_json(by_alias=True, exclude_none=True))
        return progress

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
                succeeded = job.observed.state is JobState.COMPLETE
                pod = a_pod(
                    terminated(job.observed.exit_code or 0),
                    phase="Succeeded" if succeeded else "Failed",
                )
        pod["metadata"] |= {"name": f"{name}-xyz", "namespace": namespace, "uid": f"uid-{name}"}
        pod["metadata"]["ownerReferences"] = [controller_reference("Job", name)]
        pod["metadata"]["labels"] = {**job.template.labels, "batch.kubernetes.io/job-name": name}
        pod["spec"]["containers"] = [{"name": STAGE_CONTAINER}]
        pod["spec"]["nodeName"] = self.nodes.get(name, "spot-1") if job.observed.started_at else ""
        return pod


class ErrorResponse(Exception):
    """A response with an error status."""

    def __init__(
        self, status: int, reason: str, message: str, causes: list[Object] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.causes = causes or []


class _Handler(BaseHTTPRequestHandler):
    server: "_Server"
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._handle("GET")

    def do_PATCH(self) -> None:
        self._handle("PATCH")

    def do_POST(self) -> None:
        self._handle("POST")

    def do_DELETE(self) -> None:
        self._handle("DELETE")

    def _handle(self, method: str) -> None:
        api = self.server.api
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        api.requests.append(f"{method} {self.path}")
        try:
            self._authenticate()
            path = [part for part in url.path.split("/") if part]
            response = self._route(
                method, path, dict(parse_qsl(url.query)), json.loads(body) if body else {}
            )
        except ErrorResponse as error:
            status = {"kind": "Status", "reason": error.reason, "message": str(error)}
            self._send(
                {**status, "details": {"causes": error.causes}} if error.causes else status,
                error.status,
            )
        else:
            if response is not None:  # a log was already sent
                self._send(response, 200)

    def _authenticate(self) -> None:
        api = self.server.api
        if api.unavailable:
            api.unavailable -= 1
            raise ErrorResponse(503, "ServiceUnavailable", "overloaded")
        if self.headers.get("Authorization") != "Bearer sesame":
            raise ErrorResponse(401, "Unauthorized", "Unauthorized")

    def _route(
        self, method: str, path: list[str], query: dict[str, str], body: Object
    ) -> Object | None:
        group, rest = (path[1], path[3:]) if path[0] == "apis" else ("", path[2:])
        namespace, rest = (rest[1], rest[2:]) if rest[0] == "namespaces" else ("", rest)
        plural, name, subresource = (*rest, "", "")[:3]
        self._authorize(
            method, group, f"{plural}/{subresource}" if subresource else plural, name, namespace
        )
        match plural, name, subresource:
            case "finetunepipelines", "", "":
                keys = [
                    key
                    for key in sorted(self.server.api.scenarios)
                    if namespace in {"", key.namespace}
                ]
                return _list([self.server.api.pipeline(key) for key in keys])
            case "finetunepipelines", _, "":
                return self._pipeline(method, Key(namespace, name), query, body)
            case "jobs" | "deployments", _, "":
                get = self.server.api.job if plural == "jobs" else self.server.api.deployment
                child = get(namespace, name)
                if child:
                    return child
            case "pods", _, _:
                return self._pods(method, namespace, name, subresource, {**query, **body})
            case "events", "", "":
                return _list([])
        raise ErrorResponse(404, "NotFound", f'{plural} "{name}" not found')

    def _pods(
        self, method: str, namespace: str, name: str, subresource: str, options: Object
    ) -> Object | None:
        api = self.server.api
        match method, subresource:
            case "GET", "" if not name:
                label, _, value = options["labelSelector"].partition("=")
                return _list(
                    [
                        pod
                        for pod in api.pods(namespace)
                        if pod["metadata"]["labels"].get(label) == value
                    ]
                )
            case "GET", "":
                return api.pod(namespace, name)
            case "GET", "log":
                self._log(name.removesuffix("-xyz"), options)
                return None
            case "GET", "proxy":
                return api.progress(namespace, name.removesuffix("-xyz:8080"))
            case _:
                return self._end_pod(api.pod(namespace, name), method, options)

    def _authorize(self, method: str, group: str, plural: str, name: str, namespace: str) -> None:
        api = self.server.api
        if plural == PIPELINES and not api.installed:
            raise ErrorResponse(404, "", "404 page not found")
        verbs = {
            "PATCH": "patch",
            "POST": "create",
            "DELETE": "delete",
            "GET": "get" if name else "list",
        }
        verb = verbs[method]
        if (verb, plural) in api.forbidden:
            scope = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
            kind = f"{plural}.{group}" if group else plural.partition("/")[0]
            message = f'{kind} "{name}" is forbidden: User "bob" cannot {verb} resource "{plural}" '
            raise ErrorResponse(403, "Forbidden", f'{message}in API group "{group}" {scope}')

    def _end_pod(self, pod: Object, method: str, given: Object) -> Object:
        api = self.server.api
        options = given if method == "DELETE" else given["deleteOptions"]
        if api.admission_without_dry_run and given.get("dryRun"):
            raise ErrorResponse(400, "BadRequest", "admission webhook does not support dry run")
        if options.get("preconditions", {}).get("uid") != pod["metadata"]["uid"]:
            raise ErrorResponse(409, "Conflict", "the UID in the precondition does not match")
        if method == "POST" and api.disruption_budgets:
            causes = [
                {"reason": "DisruptionBudget", "message": message}
                for message in api.disruption_budgets
            ]
            message = "Cannot evict pod as it would violate the pod's disruption budget."
            raise ErrorResponse(429, "TooManyRequests", message, causes)
        if not given.get("dryRun"):
            without_grace = options.get("gracePeriodSeconds") == 0
            api.on_eviction(
                pod["metadata"]["name"].removesuffix("-xyz"), "kill" if without_grace else "evict"
            )
        return {"kind": "Status", "status": "Success"}

    def _pipeline(self, method: str, key: Key, query: dict[str, str], body: Object) -> Object:
        api = self.server.api
        if method == "PATCH" and (key in api.scenarios or query.get("dryRun")):
            return api.patch(key, body, query, self.headers["Content-Type"])
        if key in api.scenarios and api.scenarios[key].key in api.scenarios[key].cluster.pipelines:
            return api.pipeline(key)
        raise ErrorResponse(404, "NotFound", f'{PIPELINES}.finetune.dev "{key.name}" not found')

    def _log(self, job: str, query: dict[str, str]) -> None:
        """Send the log; with `follow`, also new lines until the process has ended, for 20 s at most."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        message = self.server.api.kubelet_messages.pop(job, "")
        if message:
            self._chunk(message.encode())
            self._chunk(b"")
            return
        sent = 0
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            is_running = query.get("follow") == "true" and self._is_running(job)
            lines = self.server.api.logs.get(job, [])
            for number, line in enumerate(lines[sent:], sent):
                self._chunk(f"2030-01-01T00:00:{number // 2:02}.{number:09}Z {line}\n".encode())
                if job in self.server.api.interrupted_logs:
                    self.server.api.interrupted_logs.remove(job)
                    self.close_connection = True
                    return
            sent = len(lines)
            if not is_running:
                break
            time.sleep(0.02)
        self._chunk(b"")

    def _chunk(self, text: bytes) -> None:
        self.wfile.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")

    def _is_running(self, job: str) -> bool:
        jobs = [
            scenario.cluster.jobs[job]
            for scenario in self.server.api.scenarios.values()
            if job in scenario.cluster.jobs
        ]
        return bool(jobs) and jobs[0].live

    def _send(self, response: Object, status: int) -> None:
        is_plain_text = (
            status == 404 and not response["reason"]
        )  # as for a resource that is not installed
        text = (
            response["message"].encode()
            if is_plain_text
            else json.dumps(response, sort_keys=True).encode()
        )
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def _list(items: list[Object]) -> Object:
    return {"metadata": {}, "items": items}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, api: FakeApiServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.api = api


@contextmanager
def serving() -> Iterator[tuple[FakeApiServer, str]]:
    """Run a fake API server; yields it and its URL."""
    api = FakeApiServer()
    server = _Server(api)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield api, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timedelta(seconds=5).total_seconds())


def kubeconfig(url: str, **namespaces: str | None) -> str:
    """Return a kubeconfig with a context for each namespace; the first is the current context.

    Two more contexts fail: `unreachable` has no server, and the user of `unauthorized` has a wrong token.
    """
    contexts = [
        {
            "name": name,
            "context": {
                "cluster": "fake",
                "user": "bob",
                **({"namespace": space} if space else {}),
            },
        }
        for name, space in namespaces.items()
    ]
    contexts.append({"name": "unreachable", "context": {"cluster": "none", "user": "bob"}})
    contexts.append({"name": "unauthorized", "context": {"cluster": "fake", "user": "eve"}})
    servers = {"fake": url, "none": "http://127.0.0.1:1"}
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": contexts[0]["name"],
            "contexts": contexts,
            "clusters": [
                {"name": name, "cluster": {"server": server}} for name, server in servers.items()
            ],
            "users": [
                {"name": "bob", "user": {"token": "sesame"}},
                {"name": "eve", "user": {"token": "wrong"}},
            ],
        }
    )
