"""The HTTP server of a stage's progress, which no client can mute: /metrics, /progress and POST /save."""

import socket
import threading
import time
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from typing_extensions import override

from finetune_trainer.contract import Progress
from finetune_trainer.contract.environment import METRICS_PORT
from finetune_trainer.contract.field_docs import field_docs
from finetune_trainer.listening import listen_on_all_addresses
from finetune_trainer.runtime.errors import ServiceUnavailable

METRICS = {
    f"finetune_stage_{name}": " ".join(text.removesuffix(".").split())
    for name, text in field_docs(Progress).items()
    if name not in {"stage", "updated_at", "note", "reused", "notice", "loss_curve"}
}
"""Name and help text of each metric: the fields of Progress that are numbers."""
# The operator waits 2 s for an answer, Prometheus 10 s by default.
CONNECTION_SECONDS = 10.0
"""Age at which a connection is closed, whatever its client does. So a client that is gone costs nothing for long."""
MOST_CONNECTIONS = 32
"""Open connections, each with a thread. One more closes the oldest: a client that asks is answered at once."""
QUEUED_CONNECTIONS = 128
"""Connections that the kernel keeps until this process accepts them."""


def serve_progress(
    port: int, progress: Callable[[], Progress], save: Callable[[], None]
) -> None:
    """Serve /metrics, /progress and POST /save on all addresses, in daemon threads.

    Raise ServiceUnavailable if binding fails.
    """
    try:
        server = _Server(port, _application(progress, save))
    except (OSError, OverflowError) as error:
        raise ServiceUnavailable(
            f"{METRICS_PORT}: cannot listen on port {port}: {error}"
        ) from error
    threading.Thread(target=server.serve_forever, daemon=True, name="metrics").start()


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection. An idle client, a slow client and a client that is gone keep no other waiting."""

    daemon_threads = True
    request_queue_size = QUEUED_CONNECTIONS

    def __init__(self, port: int, application: Callable[..., Any]) -> None:
        self._lock = threading.Lock()
        self._opened_at: dict[socket.socket, float] = {}
        """When each open connection was accepted, the oldest first."""
        super().__init__(("", port), _QuietHandler)
        self.set_app(application)

    @override
    def server_bind(self) -> None:
        # In place of the method of the class, which binds IPv4 only and asks DNS for its own name.
        self.socket.close()
        self.socket = listen_on_all_addresses(self.server_address[1])
        self.server_name = "localhost"
        self.server_port = self.socket.getsockname()[1]
        self.setup_environ()

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own; close the oldest connection if there are too many."""
        with self._lock:
            oldest = list(self._opened_at)[: -(MOST_CONNECTIONS - 1)]
            self._opened_at[request] = time.monotonic()
        _cut(oldest)
        super().process_request(request, client_address)

    @override
    def service_actions(self) -> None:
        """Close connections that are too old. The loop of the server calls this twice a second."""
        limit = time.monotonic() - CONNECTION_SECONDS
        with self._lock:
            old = [
                connection
                for connection, opened in self._opened_at.items()
                if opened < limit
            ]
        _cut(old)

    @override
    def close_request(self, request: Any) -> None:
        with self._lock:
            self._opened_at.pop(request, None)
        super().close_request(request)

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: a client that breaks off is no event of the stage."""


def _cut(connections: Iterable[socket.socket]) -> None:
    """End the connections. Their threads, which wait for them, then close them."""
    for connection in connections:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            # Its thread has just closed it, or its client has.
            continue


class _QuietHandler(WSGIRequestHandler):
    @override
    def log_message(self, *_args: Any) -> None:
        """Log nothing: requests for metrics do not belong in the stage's log."""


def _application(
    progress: Callable[[], Progress], save: Callable[[], None]
) -> Callable[..., Iterable[bytes]]:
    """Return the WSGI application."""
    from prometheus_client import CollectorRegistry, make_wsgi_app  # noqa: PLC0415  needed only with a metrics port
    from prometheus_client.core import GaugeMetricFamily, Metric  # noqa: PLC0415

    class Collector:
        def collect(self) -> Iterable[Metric]:
            # Read once, so that all metrics of an answer are from the same moment.
            now = progress()
            for name, meaning in METRICS.items():
                value = getattr(now, name.removeprefix("finetune_stage_"))
                if value is not None:
                    family = GaugeMetricFamily(name, meaning, labels=["stage"])
                    family.add_metric([now.stage], value)
                    yield family

    registry = CollectorRegistry()
    registry.register(Collector())
    metrics = make_wsgi_app(registry)

    def app(
        environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        if environ.get("PATH_INFO") == "/save":
            return _save(environ, start_response, save)
        if environ.get("PATH_INFO") != "/progress":
            body: Iterable[bytes] = metrics(environ, start_response)
            return body
        start_response("200 OK", [("Content-Type", "application/json")])
        return [progress().model_dump_json(by_alias=True, exclude_none=True).encode()]

    return app


def _save(
    environ: dict[str, Any],
    start_response: Callable[..., Any],
    save: Callable[[], None],
) -> Iterable[bytes]:
    """Accept a request for an early save, which the training loop fulfils; other stages have nothing to save."""
    if environ.get("REQUEST_METHOD") != "POST":
        start_response(
            "405 Method Not Allowed", [("Allow", "POST"), ("Content-Length", "0")]
        )
        return []
    save()
    start_response("202 Accepted", [("Content-Length", "0")])
    return []
