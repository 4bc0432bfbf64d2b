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
        site, data = self.site, self.site.files.get(self.path.lstrip("/"))
        site.requests.append((self.command, self.headers["Range"]))
        match = self.headers["If-Match"]
        status = site.status if body else max(site.status, site.head_status)
        if status >= 300 or data is None:
            return self.reply(status if status >= 300 else 404, b"", body=body)
        if site.checks_conditions and match not in {None, site.etag}:
            return self.reply(412, b"", body=body)
        if self.headers["Range"] and site.has_ranges:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or len(data)) + 1, len(data))
            if start >= len(data):
                return self.reply(
                    416, b"", body=body, headers={"Content-Range": f"bytes */{len(data)}"}
                )
            about = {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
            return self.reply(206, data[start:end] + b"x" * site.surplus, body=body, headers=about)
        return self.reply(200, data + b"x" * (site.surplus if body else 0), body=body)

    def reply(
        self, status: int, data: bytes, *, body: bool, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Last-Modified", "Sun, 22 Nov 2026 12:00:00 GMT")
        for name, value in ({"ETag": self.site.etag} if self.site.etag else {}).items():
            self.send_header(name, value)
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
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("SiteHandler", (Handler,), {"site": site}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    site.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
