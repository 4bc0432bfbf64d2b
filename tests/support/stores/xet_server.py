"""Hugging Face's own CAS server for xet on this machine, behind a proxy that asks for tokens and counts bytes.

The server is a program of the crate xet-client, of the version of the installed hf-xet. It is built once, in about five
minutes, and cached outside the checkout.
"""

import shutil
import subprocess
from base64 import urlsafe_b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from support.programs import installed, missing
from support.stores.hub_xet import XetStorage
from support.stores.registry_proxy import Fault, Handler, RegistryProxy, Server, serving
from support.stores.servers import LOOPBACK, free_port, running

PROGRAM = "local_cas_server"
DATA = ("/simulation/xorb-uploads/", "/v1/xorbs/")
"""Paths of uploads of xorbs, which have the bytes of files."""
FETCH = "/v1/fetch_term"
"""Path of downloads of parts of xorbs."""


@dataclass
class XetProxy(RegistryProxy):
    """The proxy before a CAS server."""

    storage: XetStorage = field(init=False)
    received: list[tuple[str, int]] = field(default_factory=list)
    """Path and size of each block of bytes that was passed on to the server."""
    fetched: list[int] = field(default_factory=list)
    """Sizes of the parts of xorbs that clients have asked for."""

    def uploaded_bytes(self) -> int:
        """Return the bytes of xorbs that clients have sent."""
        return sum(size for path, size in self.received if path.startswith(DATA))

    def forget(self) -> None:
        """Forget what was requested so far."""
        for log in (self.requests, self.ranges, self.received, self.fetched):
            log.clear()


class XetHandler(Handler):
    proxy: XetProxy

    def body(self, length: int) -> Iterator[bytes] | None:
        blocks = super().body(length)
        if blocks is None:
            return None
        return self.counted(blocks)

    def forward(self, cut_after: int | None) -> None:
        if self.path.startswith(FETCH):
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            self.proxy.fetched.append(int(last) - int(first) + 1)
        super().forward(cut_after)

    def counted(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        for block in blocks:
            self.proxy.received.append((self.path, len(block)))
            yield block


@contextmanager
def serve_xet(folder: Path) -> Iterator[XetProxy]:
    """Run a CAS server with its data in a folder, and the proxy before it, while the context is open."""
    port = free_port()
    command = [
        program(),
        "--data-directory",
        str(folder),
        "--host",
        LOOPBACK,
        "--port",
        str(port),
    ]
    with running(command, port, {}):
        proxy = XetProxy(f"{LOOPBACK}:{port}")
        server = Server(
            (LOOPBACK, 0), type("CasHandler", (XetHandler,), {"proxy": proxy})
        )
        proxy.port = server.server_port
        proxy.storage = XetStorage(
            f"http://{proxy.host}", f"http://{proxy.upstream}", folder
        )
        proxy.gate = lambda _method, path, header: (
            None if proxy.storage.allows(path, header) else Fault(401)
        )
        with serving(server, proxy.over):
            yield proxy


def size_of_fetch(path: str) -> int:
    """Return the bytes of a xorb that a download asks for, which its path names; 0 if it is none."""
    if not path.startswith(FETCH):
        return 0
    xorb = urlsafe_b64decode(path.partition("term=")[2] + "==").decode()
    bounds = (part.split("-") for part in xorb.partition(":")[2].split(","))
    return sum(int(end) - int(start) for start, end in bounds)


def program() -> str:
    """Return the path of the CAS server; build it if it is missing."""
    return str(installed(f"xet-client-{version('hf-xet')}", _install) / "bin" / PROGRAM)


def _install(folder: Path) -> None:
    installed = version("hf-xet")
    if not shutil.which("cargo"):
        missing(
            f"{PROGRAM} of xet-client {installed} needs cargo: install Rust 1.85 or newer"
        )
    options = [
        "--version",
        installed,
        "--features",
        "simulation",
        "--bin",
        PROGRAM,
        "--root",
        str(folder),
    ]
    subprocess.run(
        ["cargo", "install", "--quiet", "--locked", "xet-client", *options], check=True
    )
