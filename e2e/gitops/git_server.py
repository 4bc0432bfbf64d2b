"""Git repositories over HTTP on the loopback interface, by `git http-backend`."""

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from e2e.gitops.git_repository import GitRepository


class _Handler(BaseHTTPRequestHandler):
    root: Path
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _answer(self, body: bytes) -> None:
        url = urlsplit(self.path)
        variables = {
            "GIT_PROJECT_ROOT": str(self.root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": url.path,
            "QUERY_STRING": url.query,
            "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "HTTP_GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
        }
        backend = ["git", "http-backend"]
        done = subprocess.run(
            backend,
            input=body,
            env=os.environ | variables,
            check=True,
            stdout=subprocess.PIPE,
        )
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().splitlines())
        self.send_response(int(headers.pop("Status", "200").split()[0]))
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


@dataclass(frozen=True)
class GitServer:
    """Serves each repository that lies in a folder."""

    folder: Path
    url: str

    def create(self, name: str) -> GitRepository:
        """Create a repository."""
        return GitRepository.create(self.folder / name, f"{self.url}/{name}")


@contextmanager
def running_git_server(folder: Path) -> Iterator[GitServer]:
    """Serve the repositories of a new folder until the end of the context."""
    folder.mkdir()
    handler = type("Handler", (_Handler,), {"root": folder})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield GitServer(folder, f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
