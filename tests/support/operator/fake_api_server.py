"""A fake API server over in-memory clusters, with the requests that the command line sends."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml
from support.operator.fake_api_objects import (
    PIPELINES,
    ErrorResponse,
    FakeApiServer,
    Object,
)

from finetune_operator.core.pipeline import Key


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
            content: Object = json.loads(body) if body else {}
            response = self._route(method, path, dict(parse_qsl(url.query)), content)
        except ErrorResponse as error:
            status: Object = {
                "kind": "Status",
                "reason": error.reason,
                "message": str(error),
            }
            if error.causes:
                status["details"] = {"causes": error.causes}
            self._send(status, error.status)
        else:
            if (
                response is not None
            ):  # a log or another program's response was already sent
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
        group = ""
        rest = path[2:]  # after /api/v1
        if path[0] == "apis":
            group = path[1]
            rest = path[3:]
        namespace = ""
        if rest[0] == "namespaces":
            namespace = rest[1]
            rest = rest[2:]
        plural, name, subresource = (*rest, "", "")[:3]
        resource = f"{plural}/{subresource}" if subresource else plural
        self._authorize(method, group, resource, name, namespace)
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
                get = (
                    self.server.api.job
                    if plural == "jobs"
                    else self.server.api.deployment
                )
                child = get(namespace, name)
                if child:
                    return child
            case "services", _, "proxy":
                self._proxy(method, "/".join(["", *rest[3:]]), body)
                return None
            case "pods", _, _:
                return self._pods(
                    method, namespace, name, subresource, {**query, **body}
                )
            case "events" | "persistentvolumeclaims", "", "":
                return _list(self.server.api.others(plural, namespace))
        raise ErrorResponse(404, "NotFound", f'{plural} "{name}" not found')

    def _pods(
        self, method: str, namespace: str, name: str, subresource: str, options: Object
    ) -> Object | None:
        api = self.server.api
        match method, subresource:
            case "GET", "" if not name:
                pods = list(api.pods(namespace))
                selector = options.get("labelSelector")
                if selector is None:
                    return _list(pods)
                label, _, value = selector.partition("=")
                return _list(
                    [
                        pod
                        for pod in pods
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

    def _proxy(self, method: str, path: str, body: Object) -> None:
        """Pass the request to the program that listens on `api.service_port`."""
        connection = HTTPConnection("127.0.0.1", self.server.api.service_port)
        connection.request(method, path, json.dumps(body))
        response = connection.getresponse()
        content = response.read()
        connection.close()
        self.send_response(response.status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _authorize(
        self, method: str, group: str, plural: str, name: str, namespace: str
    ) -> None:
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
            scope = (
                f'in the namespace "{namespace}"'
                if namespace
                else "at the cluster scope"
            )
            kind = f"{plural}.{group}" if group else plural.partition("/")[0]
            message = f'{kind} "{name}" is forbidden: User "bob" cannot {verb} resource "{plural}" '
            raise ErrorResponse(
                403, "Forbidden", f'{message}in API group "{group}" {scope}'
            )

    def _end_pod(self, pod: Object, method: str, given: Object) -> Object:
        api = self.server.api
        options = given if method == "DELETE" else given["deleteOptions"]
        if api.admission_without_dry_run and given.get("dryRun"):
            raise ErrorResponse(
                400, "BadRequest", "admission webhook does not support dry run"
            )
        if options.get("preconditions", {}).get("uid") != pod["metadata"]["uid"]:
            raise ErrorResponse(
                409, "Conflict", "the UID in the precondition does not match"
            )
        if method == "POST" and api.disruption_budgets:
            causes = [
                {"reason": "DisruptionBudget", "message": message}
                for message in api.disruption_budgets
            ]
            message = (
                "Cannot evict pod as it would violate the pod's disruption budget."
            )
            raise ErrorResponse(429, "TooManyRequests", message, causes)
        if not given.get("dryRun"):
            without_grace = options.get("gracePeriodSeconds") == 0
            api.on_eviction(
                pod["metadata"]["name"].removesuffix("-xyz"),
                "kill" if without_grace else "evict",
            )
        return {"kind": "Status", "status": "Success"}

    def _pipeline(
        self, method: str, key: Key, query: dict[str, str], body: Object
    ) -> Object:
        api = self.server.api
        if method == "PATCH" and (key in api.scenarios or query.get("dryRun")):
            return api.patch(key, body, query, self.headers["Content-Type"])
        if (
            key in api.scenarios
            and api.scenarios[key].key in api.scenarios[key].cluster.pipelines
        ):
            return api.pipeline(key)
        raise ErrorResponse(
            404, "NotFound", f'{PIPELINES}.finetune.dev "{key.name}" not found'
        )

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
                self._chunk(
                    f"2030-01-01T00:00:{number // 2:02}.{number:09}Z {line}\n".encode()
                )
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
        text = json.dumps(response, sort_keys=True)
        # The path of a resource that is not installed is answered in plain text.
        if status == 404 and not response["reason"]:
            text = response["message"]
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


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
    contexts.append(
        {"name": "unreachable", "context": {"cluster": "none", "user": "bob"}}
    )
    contexts.append(
        {"name": "unauthorized", "context": {"cluster": "fake", "user": "eve"}}
    )
    servers = {"fake": url, "none": "http://127.0.0.1:1"}
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": contexts[0]["name"],
            "contexts": contexts,
            "clusters": [
                {"name": name, "cluster": {"server": server}}
                for name, server in servers.items()
            ],
            "users": [
                {"name": "bob", "user": {"token": "sesame"}},
                {"name": "eve", "user": {"token": "wrong"}},
            ],
        }
    )
