"""A connection to the double of the hub: it reads requests, sends answers and files, logs both, and has faults."""

import json
import threading
import time
from abc import abstractmethod
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, BinaryIO

from support.stores.hub_state import Hub, Refused

BLOCK = 16 * 1024


class Cut(Exception):
    """The connection is closed in the middle, as a fault."""


class HubConnection(BaseHTTPRequestHandler):
    """Reads one request, has it answered, and writes a line to the log of the hub."""

    protocol_version = "HTTP/1.1"
    # Else each answer waits 40 ms for an acknowledgement of its headers.
    disable_nagle_algorithm = True
    hub: Hub
    lock: threading.Lock

    def do_GET(self) -> None:
        self.received = self.sent = self.status = self.taken = 0
        self.file = ""
        with self.lock:
            self.hub.active += 1
        try:
            self.answer()
        except Refused as refused:
            self.refuse(refused)
        except (Cut, ConnectionError):
            self.close_connection = True
        finally:
            self.write_log()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.do_GET()

    def do_PUT(self) -> None:
        self.do_GET()

    @abstractmethod
    def answer(self) -> None:
        """Answer the request; raise Refused if the hub refuses it, Cut for a fault."""

    def receive(self, file: BinaryIO) -> None:
        if self.headers["Content-Length"] is None:
            raise Refused(411, "", "MissingContentLength")
        remaining = int(self.headers["Content-Length"])
        while remaining:
            block = self.rfile.read(min(BLOCK, remaining))
            if not block:
                raise Cut
            self.taken += len(block)
            remaining -= len(block)
            self.received += len(block)
            file.write(block)
            self.misbehave(self.received)

    def send_file(self, path: Path, headers: dict[str, str]) -> None:
        """Send a file, or the range of it that the client asks for."""
        size = path.stat().st_size
        start = self.range_start(size)
        if start >= size > 0:
            self.send_empty(416, {"Content-Range": f"bytes */{size}"})
            return
        headers |= {
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        if self.headers["Range"]:
            headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
        self.start(
            206 if self.headers["Range"] else 200,
            headers | {"Content-Length": str(size - start)},
        )
        if self.command == "HEAD":
            return
        with path.open("rb") as file:
            file.seek(start)
            while block := file.read(BLOCK):
                if self.hub.faults.spoil and start + self.sent == 0:
                    block = bytes([block[0] ^ 255]) + block[1:]
                self.send_block(block)

    def send_block(self, block: bytes) -> None:
        limit = self.hub.faults.cut_after
        if limit is not None:
            block = block[: max(0, limit - self.sent)]
        self.wfile.write(block)
        self.sent += len(block)
        self.misbehave(self.sent, len(block))

    def misbehave(self, transferred: int, block: int = BLOCK) -> None:
        """Slow a transfer down or cut it, as the faults ask."""
        faults = self.hub.faults
        if faults.bytes_per_second:
            time.sleep(block / faults.bytes_per_second)
        if faults.cut_after is not None and transferred >= faults.cut_after:
            self.wfile.flush()
            raise Cut

    def range_start(self, size: int) -> int:
        header = self.headers["Range"]
        if header is None:
            return 0
        start, _, end = header.removeprefix("bytes=").partition("-")
        if end and int(end) < size - 1:
            raise Refused(501, "", "only ranges to the end")
        return int(start)

    def read_body(self) -> bytes:
        length = int(self.headers["Content-Length"] or 0) - self.taken
        self.taken += length
        return self.rfile.read(length)

    def read_json(self) -> dict[str, Any]:
        return json.loads(self.read_body())

    def send_json(
        self, value: object, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        body = json.dumps(value).encode()
        self.start(
            status,
            {
                "Content-Type": "application/json",
                "Content-Length": str(len(body)),
            }
            | (headers or {}),
        )
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_empty(self, status: int, headers: dict[str, str]) -> None:
        self.start(status, headers | {"Content-Length": "0"})

    def start(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def refuse(self, refused: Refused) -> None:
        self.read_body()  # what was not read would be taken for the next request
        headers = {"X-Error-Message": refused.message} if refused.message else {}
        if refused.code:
            headers["X-Error-Code"] = refused.code
        self.send_json(
            {"error": refused.message or HTTPStatus(refused.status).phrase},
            refused.status,
            headers,
        )

    def write_log(self) -> None:
        entry = {
            "method": self.command,
            "path": self.path,
            "status": self.status,
            "file": self.file,
        }
        line = json.dumps(entry | {"received": self.received, "sent": self.sent})
        with self.lock, self.hub.log_path.open("a") as log:
            log.write(line + "\n")
            self.hub.active -= 1

    def log_message(self, *_arguments: object) -> None:
        """Log nothing to stderr; `write_log` writes what tests read."""
