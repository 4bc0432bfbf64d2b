"""Pushing a small image to a registry, in the OCI distribution protocol, without an engine."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import urllib.request
from pathlib import Path
from typing import Any

from e2e.cluster.bare.images import architecture
from e2e.cluster.bare.images import busybox as busybox

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def layer(files: dict[str, Path]) -> bytes:
    """Give an uncompressed layer of executable files."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for inside, file in files.items():
            member = tarfile.TarInfo(inside)
            member.size, member.mode = file.stat().st_size, 0o755
            with file.open("rb") as data:
                archive.addfile(member, data)
    return content.getvalue()


def empty_config() -> dict[str, Any]:
    """Give the config of an image that says nothing."""
    return {"architecture": architecture(), "os": "linux", "config": {"Env": ["PATH=/bin"]}}


def push(registry: str, repository: str, tag: str, config: dict[str, Any], layers: list[bytes]) -> str:
    """Push and give the image's name; raises HTTPError with the registry's answer."""
    base = f"http://{registry}/v2/{repository}"
    diff_ids = [f"sha256:{hashlib.sha256(content).hexdigest()}" for content in layers]
    packed = [gzip.compress(content, mtime=0) for content in layers]
    text = json.dumps({**config, "rootfs": {"type": "layers", "diff_ids": diff_ids}}).encode()
    descriptors = [_blob(base, content, "application/vnd.oci.image.layer.v1.tar+gzip") for content in packed]
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": _blob(base, text, "application/vnd.oci.image.config.v1+json"),
        "layers": descriptors,
    }
    _ask(f"{base}/manifests/{tag}", "PUT", json.dumps(manifest).encode(), _MANIFEST)
    return f"{registry}/{repository}:{tag}"


def _blob(base: str, content: bytes, kind: str) -> dict[str, Any]:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    place = _ask(f"{base}/blobs/uploads/", "POST", b"", kind)
    _ask(f"{place}{'&' if '?' in place else '?'}digest={digest}", "PUT", content, "application/octet-stream")
    return {"mediaType": kind, "digest": digest, "size": len(content)}


def _ask(url: str, method: str, content: bytes, kind: str) -> str:
    request = urllib.request.Request(url, data=content, method=method, headers={"Content-Type": kind})  # noqa: S310 -- http, on the cluster's own network
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
        return str(answer.headers.get("Location", ""))
