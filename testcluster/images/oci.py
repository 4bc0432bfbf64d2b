"""Push a small image to a registry by the OCI distribution protocol, without an engine."""

from __future__ import annotations

import gzip
import hashlib
import json
import urllib.request
from typing import Any

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def push(
    registry: str, repository: str, tag: str, config: bytes, layers: list[bytes]
) -> str:
    """Push an image and return its name. Raises HTTPError with the registry's response."""
    base = f"http://{registry}/v2/{repository}"
    # The lowest level: a test pushes an image once, and a node pulls it once.
    packed = [gzip.compress(content, compresslevel=1, mtime=0) for content in layers]
    descriptors = [
        _blob(base, content, "application/vnd.oci.image.layer.v1.tar+gzip")
        for content in packed
    ]
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": _blob(base, config, "application/vnd.oci.image.config.v1+json"),
        "layers": descriptors,
    }
    _send(f"{base}/manifests/{tag}", "PUT", json.dumps(manifest).encode(), _MANIFEST)
    return f"{registry}/{repository}:{tag}"


def _blob(base: str, content: bytes, kind: str) -> dict[str, Any]:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    location = _send(f"{base}/blobs/uploads/", "POST", b"", kind)
    _send(
        f"{location}{'&' if '?' in location else '?'}digest={digest}",
        "PUT",
        content,
        "application/octet-stream",
    )
    return {"mediaType": kind, "digest": digest, "size": len(content)}


def _send(url: str, method: str, content: bytes, kind: str) -> str:
    headers = {"Content-Type": kind}
    request = urllib.request.Request(url, content, headers, method=method)  # noqa: S310 -- http, on the cluster's own network
    with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310
        return str(response.headers.get("Location", ""))
