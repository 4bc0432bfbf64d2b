"""A minimal client of the API server, for the programs of the benchmark: JSON in, JSON out, and raw watches."""

import base64
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
import yaml

Object = dict[str, Any]
NAMESPACE = "bench"
CONNECTIONS = 32
PAGE = 500
PIPELINES = f"/apis/finetune.dev/v1alpha1/namespaces/{NAMESPACE}/finetunepipelines"
JOBS = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
CLAIMS = f"/api/v1/namespaces/{NAMESPACE}/persistentvolumeclaims"
VOLUMES = "/api/v1/persistentvolumes"
STAGES = ("prepare", "train", "evaluate", "push")
PIPELINE = "finetune.dev/pipeline"
STAGE = "finetune.dev/stage"


class ApiError(Exception):
    """A response of the API server with a status of 400 or more."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status


class Api:
    """Verbs on paths of the API server."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def send(
        self,
        verb: str,
        path: str,
        body: bytes | Object | None = None,
        kind: str = "json",
    ) -> Object:
        """Send one request; `kind` is json, or merge-patch+json. Raises ApiError."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        async with self.session.request(
            verb, path, data=data, headers={"Content-Type": f"application/{kind}"}
        ) as got:
            content = await got.read()
        if got.status >= 400:
            raise ApiError(got.status, content[:500].decode(errors="replace"))
        answer: Object = json.loads(content)
        return answer

    async def discard(self, verb: str, path: str, body: bytes) -> None:
        """Send one request and do not parse the response. Raises ApiError."""
        async with self.session.request(
            verb, path, data=body, headers={"Content-Type": "application/json"}
        ) as got:
            content = await got.read()
        if got.status >= 400:
            raise ApiError(got.status, content[:500].decode(errors="replace"))

    async def list(self, path: str, **query: str) -> tuple[list[Object], str]:
        """Return all objects of a collection, read page by page, and the resourceVersion to watch from."""
        items: list[Object] = []
        more: dict[str, str] = {}
        while True:
            page = await self.send(
                "GET", f"{path}?{urlencode({**query, **more, 'limit': str(PAGE)})}"
            )
            items += page["items"]
            token = page["metadata"].get("continue")
            if not token:
                return items, page["metadata"]["resourceVersion"]
            more = {"continue": token}

    async def watch(
        self, path: str, version: str, **query: str
    ) -> AsyncIterator[Object]:
        """Yield the events of a collection after this resourceVersion, forever. Raises ApiError if they expired."""
        no_end = aiohttp.ClientTimeout(total=None)
        while True:
            where = {
                **query,
                "watch": "true",
                "allowWatchBookmarks": "true",
                "resourceVersion": version,
            }
            async with self.session.get(
                f"{path}?{urlencode(where)}", timeout=no_end
            ) as response:
                async for line in _lines(response.content):
                    event: Object = json.loads(line)
                    if event["type"] == "ERROR":
                        raise ApiError(
                            event["object"].get("code", 0),
                            str(event["object"].get("message")),
                        )
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        yield event


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in stream.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line


@asynccontextmanager
async def open_api(kubeconfig: Path, agent: str) -> AsyncIterator[Api]:
    """Open a client with the token of a kubeconfig; `agent` is its User-Agent."""
    config = yaml.safe_load(kubeconfig.read_text())  # noqa: ASYNC240  before any request
    cluster = config["clusters"][0]["cluster"]
    user = config["users"][0]["user"]
    trust = ssl.create_default_context(cadata=_authority(cluster))
    headers = {
        "Authorization": f"Bearer {user['token']}",
        "User-Agent": agent,
        "Accept": "application/json",
    }
    connector = aiohttp.TCPConnector(limit=CONNECTIONS, ssl=trust)
    async with aiohttp.ClientSession(
        cluster["server"], connector=connector, headers=headers
    ) as session:
        yield Api(session)


def _authority(cluster: Object) -> str:
    encoded = cluster.get("certificate-authority-data")
    if encoded:
        return base64.b64decode(encoded).decode()
    return Path(cluster["certificate-authority"]).read_text()


def condition(item: Object, kind: str) -> bool:
    """Return whether the object's condition of this type is True."""
    conditions = (item.get("status") or {}).get("conditions") or []
    return any(
        entry["type"] == kind and entry["status"] == "True" for entry in conditions
    )
