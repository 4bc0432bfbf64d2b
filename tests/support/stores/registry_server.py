"""The distribution registry as a process on this machine. The programs of the test cluster contain it."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path

from testcluster import binaries
from testcluster.linux_namespaces.certificates import Pair

START_SECONDS = 30


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return server.getsockname()[1]


@dataclass
class RegistryServer:
    """A registry with its storage in a folder. It can be stopped and started again."""

    folder: Path
    tls: Pair | None = None
    """Its certificate and key; None: it answers HTTP without TLS."""
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        config = self.folder / "config.yaml"
        tls = (
            f", tls: {{certificate: {self.tls.certificate}, key: {self.tls.key}}}"
            if self.tls
            else ""
        )
        config.write_text(
            f"version: 0.1\nlog: {{level: warn, accesslog: {{disabled: true}}}}\n"
            f"storage: {{filesystem: {{rootdirectory: {self.folder / 'storage'}}}, delete: {{enabled: true}}}}\n"
            f"http: {{addr: '{self.host}', secret: test{tls}}}\n"
        )
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [binaries.program("registry"), "serve", config],
                env=os.environ | {"OTEL_TRACES_EXPORTER": "none"},
                stdout=log,
                stderr=log,
            )
        self._wait_until_it_answers()

    def stop(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    def get(self, path: str, accept: str = "*/*") -> tuple[int, bytes]:
        """Return status and body; the test's own look at what the registry holds."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=10)) as connection:
            connection.request("GET", path, headers={"Accept": accept})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def tags(self, repository: str) -> list[str]:
        """Return the sorted tags of a repository."""
        status, body = self.get(f"/v2/{repository}/tags/list")
        return sorted(json.loads(body)["tags"] or []) if status == 200 else []

    def manifests(self, repository: str) -> list[str]:
        """Return the digests of all manifests that were ever put, also of those without a tag."""
        revisions = (
            self._storage
            / "repositories"
            / repository
            / "_manifests"
            / "revisions"
            / "sha256"
        )
        return [f"sha256:{path.name}" for path in sorted(revisions.glob("*"))]

    def blob(self, digest: str) -> Path:
        """Return the file in which the registry stores a blob."""
        value = digest.removeprefix("sha256:")
        return self._storage / "blobs" / "sha256" / value[:2] / value / "data"

    def stored_bytes(self) -> int:
        """Return the size of all blobs and of all uploads that have not ended."""
        return sum(
            path.stat().st_size
            for path in self._storage.rglob("data")
            if path.is_file()
        )

    @property
    def _storage(self) -> Path:
        return self.folder / "storage" / "docker" / "registry" / "v2"

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while (
            time.monotonic() < deadline and self.process and self.process.poll() is None
        ):
            try:
                return self._connect()
            except OSError:
                time.sleep(0.02)
        raise AssertionError((self.folder / "log").read_text())

    def _connect(self) -> None:
        socket.create_connection(("127.0.0.1", self.port), timeout=1).close()


@contextmanager
def serve_registry(folder: Path, tls: Pair | None = None) -> Iterator[RegistryServer]:
    """Run a registry while the context is open."""
    server = RegistryServer(folder, tls)
    server.start()
    try:
        yield server
    finally:
        server.stop()
