"""A web server on this machine with the behaviours that a test needs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Site:
    """The files of a web server, and how it answers."""

    files: dict[str, bytes]
    etag: str | None = '"1"'
    status: int = 200
    """Status of every response; below 300 the file decides."""
    has_ranges: bool = True
    checks_conditions: bool = True
    """Whether it obeys If-Match."""
    head_status: int = 200
    """Status of responses to HEAD, as `status`; 403 for an address that is signed for GET only."""
    surplus: int = 0
    """Bytes that a GET has behind the file's."""
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """Method and Range of each request."""
    url: str = ""


class Handler(BaseHTTPRequestHandler):
    site: Site

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        site = self.site
        data = self.site.files.get(self.path.lstrip("/"))
        site.requests.append((self.command, self.headers["Range"]))
        match = self.headers["If-Match"]
        status = site.status
        if not body:
            status = max(status, site.head_status)
        if status >= 300:
            return self.reply(status, b"", body=body)
        if data is None:
            return self.reply(404, b"", body=body)
        if site.checks_conditions and match not in {None, site.etag}:
            return self.reply(412, b"", body=body)
        if self.headers["Range"] and site.has_ranges:
            return self.answer_range(data, body=body)
        if body:
            data += b"x" * site.surplus
        return self.reply(200, data, body=body)

    def answer_range(self, data: bytes, *, body: bool) -> None:
        size = len(data)
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        start = int(first)
        end = min(int(last or size) + 1, size)
        if start >= size:
            headers = {"Content-Range": f"bytes */{size}"}
            return self.reply(416, b"", body=body, headers=headers)
        headers = {"Content-Range": f"bytes {start}-{end - 1}/{size}"}
        content = data[start:end] + b"x" * self.site.surplus
        return self.reply(206, content, body=body, headers=headers)

    def reply(
        self,
        status: int,
        data: bytes,
        *,
        body: bool,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Last-Modified", "Sun, 22 Nov 2026 12:00:00 GMT")
        if self.site.etag:
            self.send_header("ETag", self.site.etag)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_arguments: object) -> None:
        """Log nothing."""


@contextmanager
def serve(site: Site) -> Iterator[Site]:
    """Serve the site on 127.0.0.1 while the context is open; `site.url` is its address."""
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), type("SiteHandler", (Handler,), {"site": site})
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    site.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
