"""An HTTP proxy before a registry: it records requests and injects faults."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CHUNK_BYTES = 1 << 16
HANG_SECONDS = 60


@dataclass
class Fault:
    """What the proxy does to one request instead of passing it on."""

    status: int = 0
    """Status of an answer of the proxy's own; 0: the registry answers."""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut_after: int | None = None
    """Bytes of the registry's answer after which the connection is closed."""
    hangs: bool = False
    """Whether the proxy neither passes the request on nor answers it; with `cut_after`, stops answering then."""
    ignores_range: bool = False
    """Whether the whole blob is answered to a request for a part."""


@dataclass
class RegistryProxy:
    """The address of the proxy, the requests so far, and the faults to come."""

    upstream: str
    port: int = 0
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of each request, in order."""
    ranges: list[str] = field(default_factory=list)
    """The parts of blobs that were asked for, in order."""
    fault: Callable[[str, str], Fault | None] = lambda _method, _path: None
    """Returns the fault for a method and a path."""
    gate: Callable[[str, str, str | None], Fault | None] = (
        lambda _method, _path, _header: None
    )
    """Returns the refusal for a method, a path and the header Authorization."""
    hanging: threading.Event = field(default_factory=threading.Event)
    """Set when a request hangs."""
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def count(self, method: str, part: str = "") -> int:
        """Return the number of requests with this method whose path contains a part."""
        return sum(used == method and part in path for used, path in self.requests)


class Handler(BaseHTTPRequestHandler):
    proxy: RegistryProxy
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        self.proxy.requests.append((self.command, self.path))
        self.proxy.ranges += self.headers.get_all("Range", [])
        refusal = self.proxy.gate(
            self.command, self.path, self.headers["Authorization"]
        )
        fault = refusal or self.proxy.fault(self.command, self.path) or Fault()
        if fault.ignores_range:
            del self.headers["Range"]
        if fault.hangs and fault.cut_after is None:
            self.hang()
        elif fault.status:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(fault.status)
            for name, value in (
                {"Content-Length": str(len(fault.body))} | fault.headers
            ).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(fault.body)
        else:
            self.forward(fault.cut_after)
            if fault.hangs:
                self.hang()

    def hang(self) -> None:
        self.close_connection = True
        self.proxy.hanging.set()
        self.proxy.over.wait(HANG_SECONDS)

    do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = answer  # noqa: N815  named by http.server

    def forward(self, cut_after: int | None) -> None:
        with closing(
            HTTPConnection(self.proxy.upstream, timeout=HANG_SECONDS)
        ) as connection:
            length = int(self.headers.get("Content-Length", 0))
            connection.request(
                self.command, self.path, self.body(length), dict(self.headers)
            )
            answer = connection.getresponse()
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                self.send_header(name, value)
            self.end_headers()
            left = sys.maxsize if cut_after is None else cut_after
            while chunk := answer.read(min(left, CHUNK_BYTES)):
                self.wfile.write(chunk)
                left -= len(chunk)
        self.close_connection |= cut_after is not None

    def body(self, length: int) -> Iterator[bytes] | None:
        def chunks(left: int) -> Iterator[bytes]:
            while left:
                chunk = self.rfile.read(min(CHUNK_BYTES, left))
                if not chunk:
                    return
                left -= len(chunk)
                yield chunk

        if not length:
            return None
        return chunks(length)

    def log_message(self, *_arguments: object) -> None:
        """Log nothing."""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_arguments: object) -> None:
        """Ignore clients that are killed in the middle."""


@contextmanager
def serve_proxy(upstream: str) -> Iterator[RegistryProxy]:
    """Run a proxy before host:port while the context is open."""
    proxy = RegistryProxy(upstream)
    server = Server(
        ("127.0.0.1", 0), type("ProxyHandler", (Handler,), {"proxy": proxy})
    )
    proxy.port = server.server_port
    with serving(server, proxy.over):
        yield proxy


@contextmanager
def serving(server: ThreadingHTTPServer, over: threading.Event) -> Iterator[None]:
    """Run a server in a thread while the context is open; set the event when it is over."""
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    ).start()
    try:
        yield
    finally:
        over.set()
        server.shutdown()
        server.server_close()
