"""The xet storage of a hub: tokens for a CAS server, and its files by their SHA-256.

The CAS server names a file by its xet hash, the hub by its SHA-256. Shards in the server's folder have both.
"""

import hashlib
import os
import struct
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Permission = Literal["read", "write"]
TOKEN_SECONDS = 3600
HEADER_BYTES = ENTRY_BYTES = 48
"""Size of a shard's header, and of each entry behind it."""
WITH_VERIFICATION = 1 << 31
WITH_SHA256 = 1 << 30
LAST_ENTRY = b"\xff" * 32
SIGNED = ("/simulation/xorb-uploads/", "/v1/fetch_term")
"""Paths of signed URLs, which take no token, like the signed URLs of an object store."""
READING = (
    "/v1/reconstructions/",
    "/v2/reconstructions/",
    "/v1/chunks/",
    "/v1/telemetry",
)
WRITING = (
    "/v1/xorb-grants/",
    "/v1/xorb-commits/",
    "/v1/xorbs/",
    "/v1/shards",
    "/v2/shards",
)


@dataclass
class XetStorage:
    """The files of a CAS server in one folder, and the tokens that a hub has issued for it."""

    url: str
    """Address of the server for clients."""
    server: str
    """Address of the server for the hub."""
    folder: Path
    tokens: dict[str, Permission] = field(default_factory=dict)

    def issue(self, permission: Permission) -> tuple[str, int]:
        """Return a new token and the time of its end, in seconds since the epoch."""
        token = f"xet_{os.urandom(8).hex()}"
        self.tokens[token] = permission
        return token, int(time.time()) + TOKEN_SECONDS

    def allows(self, path: str, header: str | None) -> bool:
        """Return whether a request with this path and header Authorization may pass to the server."""
        if path.startswith(SIGNED):
            return header is None
        permission = self.tokens.get((header or "").removeprefix("Bearer "))
        if permission == "write" and path.startswith(WRITING):
            return True
        return permission is not None and path.startswith(READING)

    def hashes(self) -> dict[str, str]:
        """Return the xet hash of each file, by the SHA-256 of its content."""
        return {
            sha256: xet
            for path in self.folder.glob("shards/*.mdb")
            for xet, sha256 in read_shard(path)
        }

    def content(self, sha256: str) -> bytes | None:
        """Return a file as the server puts it together; None if there is none, or if its content is wrong."""
        xet_hash = self.hashes().get(sha256)
        if xet_hash is None:
            return None
        with urllib.request.urlopen(
            f"{self.server}/simulation/files/{xet_hash}/data"
        ) as answer:
            content = answer.read()
        if hashlib.sha256(content).hexdigest() != sha256:
            return None
        return content


def read_shard(path: Path) -> Iterator[tuple[str, str]]:
    """Yield xet hash and SHA-256 of the files in a shard."""
    data = path.read_bytes()
    start = HEADER_BYTES
    name = data[start : start + 32]
    while name != LAST_ENTRY:
        flags, segments = struct.unpack_from("<II", data, start + 32)
        entries_each = 2 if flags & WITH_VERIFICATION else 1
        start += ENTRY_BYTES * (1 + segments * entries_each)
        if flags & WITH_SHA256:
            yield hexadecimal(name), hexadecimal(data[start : start + 32])
            start += ENTRY_BYTES
        name = data[start : start + 32]


def hexadecimal(digest: bytes) -> str:
    """Return a hash as xet writes it: four little-endian numbers."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", digest))
