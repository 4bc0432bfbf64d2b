"""Metadata endpoints of three clouds, as local servers that check requests as the clouds do."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


class MetadataServer:
    """What an endpoint knows; a test changes it while it is served."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        """Path -> JSON value, or text; a path that is absent is answered with 404."""
        self.changed = threading.Condition()
        self.requests: list[str] = []
        """Method and path of every request."""
        self.status = 0
        """Status of every answer, with a page of HTML; 0: the real answer."""
        self.tokens: set[str] = set()
        """EC2's tokens that have not expired."""
        self.flavor = "Google"
        """GCE's header Metadata-Flavor."""

    def set(self, path: str, value: Any) -> None:
        """Change a value, which ends the requests that wait for it."""
        with self.changed:
            self.values[path] = value
            self.changed.notify_all()

    def etag(self, path: str) -> str:
        """Return what identifies a value."""
        return f"{hash(str(self.values.get(path))):x}"


class _Handler(BaseHTTPRequestHandler):
    served: MetadataServer

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, text: str = "", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def found(self, path: str, **headers: str) -> None:
        value = self.served.values.get(path)
        if value is None:
            self.answer(404, "<html>Not Found</html>", **headers)
        else:
            self.answer(
                200, value if isinstance(value, str) else json.dumps(value), **headers
            )

    def handle_one(self) -> None:
        self.served.requests.append(f"{self.command} {self.path}")
        if self.served.status:
            self.answer(self.served.status, "<html>out of order</html>")
        else:
            self.respond(urlsplit(self.path).path, parse_qs(urlsplit(self.path).query))

    do_GET = do_PUT = do_POST = handle_one  # noqa: N815  names of the base class

    def respond(self, path: str, query: dict[str, list[str]]) -> None:
        raise NotImplementedError


class Ec2Handler(_Handler):
    """IMDSv2: no answer without a token that has not expired."""

    def respond(self, path: str, query: dict[str, list[str]]) -> None:
        if path == "/latest/api/token":
            if (
                self.command != "PUT"
                or not self.headers.get(
                    "X-aws-ec2-metadata-token-ttl-seconds", ""
                ).isdigit()
            ):
                self.answer(400)
                return
            token = f"token-{len(self.served.requests)}=="
            self.served.tokens.add(token)
            self.answer(200, token)
        elif self.headers.get("X-aws-ec2-metadata-token") not in self.served.tokens:
            self.answer(401, "<html>Unauthorized</html>")
        else:
            self.found(path)


class GceHandler(_Handler):
    """Compute Engine: refuses a request without the header, and answers a waiting request when the value changes."""

    def respond(self, path: str, query: dict[str, list[str]]) -> None:
        if self.headers.get("Metadata-Flavor") != "Google":
            self.answer(403, "<html>Missing Metadata-Flavor:Google header</html>")
            return
        with self.served.changed:
            if query.get("wait_for_change") == ["true"]:
                [last] = query["last_etag"]
                seconds = float(query["timeout_sec"][0])
                self.served.changed.wait_for(
                    lambda: self.served.etag(path) != last, seconds
                )
        self.found(
            path, Metadata_Flavor=self.served.flavor, ETag=self.served.etag(path)
        )


class AzureHandler(_Handler):
    """Azure: refuses a request without the header or without a version."""

    def respond(self, path: str, query: dict[str, list[str]]) -> None:
        if self.headers.get("Metadata") != "true" or "api-version" not in query:
            self.answer(
                400, '{"error": "Bad request. Required metadata header not specified"}'
            )
        else:
            self.found(path)


HANDLERS = {"EC2": Ec2Handler, "GCE": GceHandler, "Azure": AzureHandler}


@contextmanager
def metadata_server(cloud: str) -> Iterator[tuple[MetadataServer, str]]:
    """Serve the endpoint of a cloud; yield the values that it serves, and its base URL."""
    served = MetadataServer()
    handler = type("Handler", (HANDLERS[cloud],), {"served": served})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield served, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
