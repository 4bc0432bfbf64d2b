"""A double of an MLflow tracking server with the rules of its SQL store.

A point that is logged again with the same time is one point, and with another time it is two. Parameters never change.
`tests/integration/stores/test_mlflow.py` runs the same tests against a real server.
"""

import contextlib
import json
import re
import threading
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

Body = dict[str, Any]


class Refused(Exception):
    """An answer with an error code."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class MlflowServer:
    """Experiments, runs and registered models in memory."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, Body] = {}
        self.versions: dict[str, list[Body]] = {}
        self.aliases: dict[tuple[str, str], str] = {}
        self.artifacts: dict[str, str] = {}
        """Content by path, which begins with the run's id."""
        self.artifact_root = "mlflow-artifacts:/"
        self.token = ""
        """If set, the bearer token without which every request is refused."""
        self.delay = 0.0
        """Seconds before every answer."""
        self.lock = threading.Lock()
        self.uri = ""

    def metrics(self, run: Body) -> dict[str, list[tuple[int, float]]]:
        """Return the points of a run's metrics as (step, value), sorted."""
        points: dict[str, list[tuple[int, float]]] = {}
        for key, value, _time, step in sorted(run["points"]):
            points.setdefault(key, []).append((step, value))
        return {key: sorted(values) for key, values in points.items()}

    def check(self, authorization: str | None) -> None:
        """Raise Refused if a token is needed and the header has another token."""
        if self.token and authorization != f"Bearer {self.token}":
            raise Refused(401, "UNAUTHENTICATED", "the token is wrong")

    def answer(self, path: str, body: Body) -> Body:
        """Return the answer to one request."""
        name = "do_" + re.sub(r"\W", "_", path.removeprefix("/api/2.0/mlflow/"))
        if not path.startswith("/api/2.0/mlflow/") or not hasattr(self, name):
            raise Refused(
                404, "ENDPOINT_NOT_FOUND", f"this double does not know {path}"
            )
        with self.lock:
            answer: Body = getattr(self, name)(body)
        return answer

    def do_experiments_get_by_name(self, body: Body) -> Body:
        name = body["experiment_name"]
        if name not in self.experiments:
            raise Refused(404, "RESOURCE_DOES_NOT_EXIST", f"no experiment {name}")
        experiment = {
            "experiment_id": self.experiments[name],
            "name": name,
            "lifecycle_stage": "active",
        }
        return {"experiment": experiment}

    def do_experiments_create(self, body: Body) -> Body:
        if body["name"] in self.experiments:
            raise Refused(
                400, "RESOURCE_ALREADY_EXISTS", f"experiment {body['name']} exists"
            )
        self.experiments[body["name"]] = str(len(self.experiments) + 1)
        return {"experiment_id": self.experiments[body["name"]]}

    def do_runs_search(self, body: Body) -> Body:
        match = re.fullmatch(r"tags\.`([\w.]+)` = '(\w+)'", body["filter"])
        if not match:
            raise Refused(
                400,
                "INVALID_PARAMETER_VALUE",
                f"this double does not know the filter {body['filter']}",
            )
        runs = [
            run
            for run in self.runs.values()
            if run["experiment"] in body["experiment_ids"]
        ]
        return {
            "runs": [
                self._run(run) for run in runs if run["tags"].get(match[1]) == match[2]
            ]
        }

    def do_runs_create(self, body: Body) -> Body:
        if body["experiment_id"] not in self.experiments.values():
            raise Refused(
                404, "RESOURCE_DOES_NOT_EXIST", f"no experiment {body['experiment_id']}"
            )
        run = {
            "id": uuid.uuid4().hex,
            "name": body["run_name"],
            "experiment": body["experiment_id"],
            "status": "RUNNING",
            "tags": {tag["key"]: tag["value"] for tag in body["tags"]},
            "params": {},
            "points": set(),
        }
        self.runs[run["id"]] = run
        return {"run": self._run(run)}

    def do_runs_get(self, body: Body) -> Body:
        return {"run": self._run(self._get(body))}

    def do_runs_log_batch(self, body: Body) -> Body:
        run = self._get(body)
        metrics = body.get("metrics", [])
        params = body.get("params", [])
        if len(metrics) > 1000 or len(params) > 100:
            raise Refused(
                400,
                "INVALID_PARAMETER_VALUE",
                f"{len(metrics)} metrics and {len(params)} params",
            )
        for param in params:
            if (
                run["params"].get(param["key"], param["value"]) != param["value"]
                or len(param["value"]) > 6000
            ):
                raise Refused(
                    400,
                    "INVALID_PARAMETER_VALUE",
                    f"changing param {param['key']} is not allowed",
                )
        run["params"].update({param["key"]: param["value"] for param in params})
        for metric in metrics:
            self._add(run, metric)
        return {}

    def do_runs_log_metric(self, body: Body) -> Body:
        self._add(self._get(body), body)
        return {}

    def do_runs_set_tag(self, body: Body) -> Body:
        self._get(body)["tags"][body["key"]] = body["value"]
        return {}

    def do_runs_update(self, body: Body) -> Body:
        run = self._get(body)
        run["status"] = body.get("status", run["status"])
        return {"run_info": self._run(run)["info"]}

    def do_metrics_get_history(self, body: Body) -> Body:
        points = [
            point
            for point in self._get(body)["points"]
            if point[0] == body["metric_key"]
        ]
        keys = ("key", "value", "timestamp", "step")
        return {"metrics": [dict(zip(keys, point, strict=True)) for point in points]}

    def do_registered_models_create(self, body: Body) -> Body:
        if body["name"] in self.versions:
            raise Refused(
                400,
                "RESOURCE_ALREADY_EXISTS",
                f"registered model {body['name']} exists",
            )
        self.versions[body["name"]] = []
        return {"registered_model": {"name": body["name"]}}

    def do_registered_models_get(self, body: Body) -> Body:
        if body["name"] not in self.versions:
            raise Refused(
                404, "RESOURCE_DOES_NOT_EXIST", f"no registered model {body['name']}"
            )
        return {"registered_model": {"name": body["name"]}}

    def do_model_versions_search(self, body: Body) -> Body:
        match = re.fullmatch(r"name = '([\w. -]+)'", body["filter"])
        if not match:
            raise Refused(
                400,
                "INVALID_PARAMETER_VALUE",
                f"this double does not know the filter {body['filter']}",
            )
        return {"model_versions": self.versions.get(match[1], [])}

    def do_model_versions_create(self, body: Body) -> Body:
        if body["name"] not in self.versions:
            raise Refused(
                404, "RESOURCE_DOES_NOT_EXIST", f"no registered model {body['name']}"
            )
        versions = self.versions[body["name"]]
        keys = ("name", "source", "run_id", "tags")
        versions.append(
            {
                "version": str(len(versions) + 1),
                "status": "READY",
                **{key: body[key] for key in keys},
            }
        )
        return {"model_version": versions[-1]}

    def do_registered_models_alias(self, body: Body) -> Body:
        if re.fullmatch(r"latest|v\d+", body["alias"], re.IGNORECASE):
            raise Refused(
                400, "INVALID_PARAMETER_VALUE", f"alias {body['alias']} is reserved"
            )
        if not any(
            version["version"] == body["version"]
            for version in self.versions[body["name"]]
        ):
            raise Refused(
                404, "RESOURCE_DOES_NOT_EXIST", f"no version {body['version']}"
            )
        self.aliases[body["name"], body["alias"]] = body["version"]
        return {}

    def _get(self, body: Body) -> Body:
        if body.get("run_id") not in self.runs:
            raise Refused(
                404, "RESOURCE_DOES_NOT_EXIST", f"no run {body.get('run_id')}"
            )
        return self.runs[body["run_id"]]

    def _add(self, run: Body, metric: Body) -> None:
        run["points"].add(
            (
                metric["key"],
                metric["value"],
                int(metric["timestamp"]),
                int(metric.get("step", 0)),
            )
        )

    def _run(self, run: Body) -> Body:
        latest = {
            point[0]: point
            for point in sorted(run["points"], key=lambda point: (point[3], point[2]))
        }
        keys = ("key", "value", "timestamp", "step")
        ids = {
            "run_id": run["id"],
            "run_uuid": run["id"],
            "experiment_id": run["experiment"],
        }
        return {
            "info": {
                **ids,
                "run_name": run["name"],
                "status": run["status"],
                "lifecycle_stage": "active",
                "artifact_uri": f"{self.artifact_root}{run['id']}",
            },
            "data": {
                "metrics": [
                    dict(zip(keys, point, strict=True)) for point in latest.values()
                ],
                "params": [
                    {"key": key, "value": value} for key, value in run["params"].items()
                ],
                "tags": [
                    {"key": key, "value": value} for key, value in run["tags"].items()
                ],
            },
        }


@contextlib.contextmanager
def serve_mlflow() -> Iterator[MlflowServer]:
    """Serve a new double on this machine; its address is in `uri`."""
    server = MlflowServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(dict(parse_qsl(urlsplit(self.path).query)))

        def do_POST(self) -> None:
            self._answer(
                json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            )

        def do_PUT(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"])).decode()
            path = self.path.removeprefix("/api/2.0/mlflow-artifacts/artifacts/")
            server.artifacts[path] = content
            self._send(200, {})

        def _answer(self, body: Body) -> None:
            time.sleep(server.delay)
            try:
                server.check(self.headers["Authorization"])
                self._send(200, server.answer(urlsplit(self.path).path, body))
            except Refused as refused:
                self._send(
                    refused.status,
                    {
                        "error_code": refused.code,
                        "message": str(refused),
                    },
                )

        def _send(self, status: int, body: Body) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            with contextlib.suppress(
                ConnectionError
            ):  # the client was killed, or did not wait
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *_args: Any) -> None:
            """Log nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server.uri = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
