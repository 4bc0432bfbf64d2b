"""A Hugging Face hub on this machine with one model; it counts the downloads of every file."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Hub:
    """The files of one repository, and what was requested."""

    def __init__(self, repository: str, files: dict[str, bytes]) -> None:
        self.repository, self.files = repository, files
        self.downloads: Counter[str] = Counter()
        self.url = ""

    @property
    def commit(self) -> str:
        """The commit of main, which changes with the files."""
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()


def model_files(folder: Path) -> dict[str, bytes]:
    """Return a model's files, and files in other formats that no stage needs."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return files | {"pytorch_model.bin": b"pickle", "original/consolidated.00.pth": b"pickle", "onnx/model.onnx": b"x"}


class HubHandler(BaseHTTPRequestHandler):
    """Answers the requests with which huggingface_hub downloads a model."""

    hub: Hub

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        content = self.content(body=body)
        self.send_response(404 if content is None else 200)
        self.send_header("X-Repo-Commit", self.hub.commit)
        self.send_header("ETag", f'"{hashlib.sha1(content or b"").hexdigest()}"')
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        if body and content:
            self.wfile.write(content)

    def content(self, *, body: bool) -> bytes | None:
        """Return what the path names: the repository's description, its list of files, or a file."""
        api = f"/api/models/{self.hub.repository}"
        if self.path.startswith(f"{api}/tree/"):
            return json.dumps([_entry(name, content) for name, content in sorted(self.hub.files.items())]).encode()
        if self.path.startswith(api):
            siblings = [{"rfilename": name} for name in sorted(self.hub.files)]
            return json.dumps({"id": self.hub.repository, "sha": self.hub.commit, "siblings": siblings}).encode()
        name = self.path.partition(f"/{self.hub.repository}/resolve/")[2].partition("/")[2]
        if body and name in self.hub.files:
            self.hub.downloads[name] += 1
        return self.hub.files.get(name)

    def log_message(self, *_arguments: object) -> None:
        """Log nothing."""


def _entry(name: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


@contextmanager
def serve_hub(hub: Hub) -> Iterator[Hub]:
    """Serve the repository on 127.0.0.1 while the context is open; `hub.url` is its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (HubHandler,), {"hub": hub}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
