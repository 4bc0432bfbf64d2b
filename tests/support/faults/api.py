"""A client of the test cluster's API server with administrator rights, for the tests' own requests."""

import asyncio
import base64
import json
import ssl
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import yaml

Object = dict[str, Any]
Objects = list[Object]
PIPELINES = "/apis/finetune.dev/v1alpha1"
READ_BUFFER = 4 << 20
"""Bytes; a watch event is one line, and a longer line than the buffer is an error in aiohttp."""
PATIENCE_SECONDS = 60.0
"""For how long a request is repeated that the API server does not answer, because it is being restarted."""


class ApiFailure(Exception):
    """The API server rejected a request."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text[:500]}")
        self.status = status


@dataclass(frozen=True)
class Endpoint:
    """Address of an API server and the TLS context with the administrator's certificate."""

    url: str
    tls: ssl.SSLContext

    @classmethod
    def read(cls, kubeconfig: Path) -> "Endpoint":
        """Read a kubeconfig whose user has a client certificate."""
        config = yaml.safe_load(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        user = config["users"][0]["user"]
        tls = ssl.create_default_context(
            cadata=_content(cluster, "certificate-authority").decode()
        )
        with tempfile.TemporaryDirectory() as folder:
            pair = Path(folder) / "pair.pem"
            pair.write_bytes(
                _content(user, "client-certificate")
                + b"\n"
                + _content(user, "client-key")
            )
            tls.load_cert_chain(pair)
        return cls(cluster["server"], tls)

    def session(self) -> aiohttp.ClientSession:
        """Create a session without a limit of connections."""
        connector = aiohttp.TCPConnector(ssl=self.tls, limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        return aiohttp.ClientSession(
            connector=connector, read_bufsize=READ_BUFFER, timeout=timeout
        )


def _content(entry: dict[str, str], name: str) -> bytes:
    data = entry.get(f"{name}-data")
    if data:
        return base64.b64decode(data)
    return Path(entry[name]).read_bytes()


class Api:
    """Verbs on paths of the API server."""

    def __init__(self, endpoint: Endpoint, session: aiohttp.ClientSession) -> None:
        self.endpoint = endpoint
        self.session = session

    async def get(self, path: str, **query: str) -> Object | None:
        """Return an object, or None if it does not exist."""
        try:
            return await self.send("GET", path, query=query)
        except ApiFailure as failure:
            if failure.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    async def list(self, path: str, **query: str) -> Objects:
        """Return the objects of a collection."""
        items: Objects = (await self.send("GET", path, query=query))["items"]
        return items

    async def create(self, path: str, body: Object) -> Object | None:
        """Create an object; return None if it exists already."""
        try:
            return await self.send("POST", path, body)
        except ApiFailure as failure:
            if failure.status == HTTPStatus.CONFLICT:
                return None
            raise

    async def patch(
        self, path: str, body: Object, kind: str = "merge-patch"
    ) -> Object | None:
        """Patch an object; return None if it does not exist."""
        try:
            return await self.send("PATCH", path, body, f"application/{kind}+json")
        except ApiFailure as failure:
            if failure.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    async def delete(self, path: str, **options: Any) -> None:
        """Delete an object if it exists and the preconditions in the options hold."""
        try:
            await self.send(
                "DELETE", path, {"apiVersion": "v1", "kind": "DeleteOptions", **options}
            )
        except ApiFailure as failure:
            if failure.status not in {HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT}:
                raise

    async def send(
        self,
        verb: str,
        path: str,
        body: Object | None = None,
        content_type: str = "application/json",
        query: dict[str, str] | None = None,
    ) -> Object:
        """Send a request; repeat it while the API server is down. Raises ApiFailure."""
        deadline = asyncio.get_running_loop().time() + PATIENCE_SECONDS
        while True:
            try:
                status, text = await self._send(verb, path, body, content_type, query)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                status = 0
                text = str(error) or type(error).__name__
            busy = (
                status in {0, HTTPStatus.TOO_MANY_REQUESTS}
                or status >= HTTPStatus.INTERNAL_SERVER_ERROR
            )
            if not busy or asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(0.3)
        if not HTTPStatus.OK <= status < HTTPStatus.BAD_REQUEST:
            raise ApiFailure(status, f"{verb} {path}: {text}")
        answer: Object = json.loads(text)
        return answer

    async def _send(
        self,
        verb: str,
        path: str,
        body: Object | None,
        content_type: str,
        query: dict[str, str] | None,
    ) -> tuple[int, str]:
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": content_type, "Accept": "application/json"}
        async with (
            asyncio.timeout(30),
            self.session.request(
                verb, self.endpoint.url + path, data=data, headers=headers, params=query
            ) as response,
        ):
            return response.status, await response.text()

    async def follow(
        self, path: str, **query: str
    ) -> AsyncIterator[tuple[str, Objects]]:
        """Yield ("LISTED", all objects), then the watch's events with one object each; list again after any error."""
        while True:
            try:
                listed = await self.send("GET", path, query=query)
                yield "LISTED", listed["items"]
                async for kind, changed in self._watch(
                    path, listed["metadata"]["resourceVersion"], query
                ):
                    yield kind, [changed]
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
                await asyncio.sleep(0.3)

    async def _watch(
        self, path: str, version: str, query: dict[str, str]
    ) -> AsyncIterator[tuple[str, Object]]:
        wanted = {**query, "watch": "true", "resourceVersion": version}
        async with self.session.get(
            self.endpoint.url + path, params=wanted
        ) as response:
            response.raise_for_status()
            async for line in response.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                yield event["type"], event["object"]
