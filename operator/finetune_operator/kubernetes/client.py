"""The API server: JSON in, JSON out, with a time limit, at the pace that it can bear, and with errors of our own."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from finetune_operator.errors import ClusterError, Conflict

Object = dict[str, Any]
TIMEOUT_SECONDS = 15.0
PAGE = 500
"""Objects in one answer to a list."""
HALVED_SECONDS = 1.0
"""Requests that were under way when the server said 429 say so as well: that is one 429."""


class ApiError(ClusterError):
    """The API server refused, or could not be asked (status 0)."""

    def __init__(self, status: int, message: str, reason: str = "", details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status, self.reason, self.details = status, reason, details or {}


class AlreadyExists(ApiError):
    """An object of this name exists."""


class NotLeader(ClusterError):
    """Another replica may be the leader by now: nothing is written."""


class RateLimiter:
    """Requests a second: one more for every hundred answers, half as many when the server says 429."""

    MIN_RATE, MAX_RATE = 1.0, 200.0

    def __init__(self, rate: float = 50.0) -> None:
        self.rate, self._next, self._halved_until = rate, 0.0, 0.0

    async def wait(self) -> None:
        """Wait for one's turn."""
        now = asyncio.get_running_loop().time()
        mine = max(now, self._next)
        self._next = mine + 1 / self.rate
        await asyncio.sleep(mine - now)

    def speed_up(self) -> None:
        """Grow bolder."""
        self.rate = min(self.MAX_RATE, self.rate + 0.01)

    def back_off(self, seconds: float) -> None:
        """Hold everybody back; those who were already under way are told the same, and it counts once."""
        now = asyncio.get_running_loop().time()
        if now >= self._halved_until:
            self.rate = max(self.MIN_RATE, self.rate / 2)
            self._halved_until = now + max(seconds, HALVED_SECONDS)
        self._next = max(self._next, now + seconds)


class KubernetesClient:
    """Verbs on paths; `may_write` is asked before each that changes something."""

    def __init__(
        self,
        client: ApiClient,
        may_write: Callable[[], bool] = lambda: True,
        told: Callable[[str, int], None] = lambda _verb, _status: None,
    ) -> None:
        self.client, self.may_write, self.on_response = client, may_write, told
        self.rate_limiter = RateLimiter()

    async def get(self, path: str) -> Object | None:
        """Give an object, or None where there is none of this name."""
        try:
            return await self._send("GET", path)
        except ApiError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    async def list(self, path: str, **query: str) -> AsyncIterator[Object]:
        """Give all objects of a collection, page by page."""
        more: dict[str, str] = {"limit": str(PAGE)}
        while more:
            page = await self._send("GET", f"{path}?{urlencode({**query, **more})}")
            for item in page["items"]:
                yield item
            token = page["metadata"].get("continue")
            more = {"limit": str(PAGE), "continue": token} if token else {}

    async def create(self, path: str, body: Object) -> Object:
        """Raise AlreadyThere for a name that is taken; a field that the server does not know is refused."""
        return await self._send("POST", f"{path}?fieldValidation=Strict", body)

    async def replace(self, path: str, body: Object) -> Object:
        """Raise Conflict where the object has changed since its resourceVersion."""
        return await self._send("PUT", path, body)

    async def patch(self, path: str, body: Object, **query: str) -> Object:
        """Merge: null removes."""
        where = f"{path}?{urlencode(query)}" if query else path
        return await self._send("PATCH", where, body, "application/merge-patch+json")

    async def apply(self, path: str, body: Object, manager: str = "finetune-operator", **query: str) -> Object:
        """Apply on the server's side, as the owner of just these fields."""
        where = f"{path}?{urlencode({'fieldManager': manager, 'force': 'true', **query})}"
        return await self._send("PATCH", where, body, "application/apply-patch+yaml")

    async def stream_lines(self, path: str, **query: str) -> AsyncIterator[str]:
        """Give a text line by line as it comes, without their ends and however long that takes. Raises ApiError."""
        no_end = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_SECONDS)
        rest = b""
        try:
            url = f"{self.client.configuration.host}{path}?{urlencode(query)}"
            answer = await self._request("GET", url, {"Accept": "*/*", **await self._credentials()}, None, no_end)
            self.on_response("GET", answer.status)
            if answer.status >= HTTPStatus.BAD_REQUEST:
                raise self._api_error(answer.status, await answer.read(), answer.headers.get("Retry-After"))
            try:
                async for piece in answer.response.content.iter_any():
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        yield line.decode(errors="replace")
            finally:
                answer.response.close()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ApiError(0, f"the API server does not answer: {str(error) or type(error).__name__}") from error
        if rest:
            yield rest.decode(errors="replace")

    async def delete(self, path: str, propagation: str = "Background", uid: str | None = None) -> None:
        """Delete an object, whether or not it is there; with a uid only that very one."""
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": propagation}
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            await self._send("DELETE", path, options)
        except ApiError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise

    async def _send(self, verb: str, path: str, body: Object | None = None, kind: str = "application/json") -> Object:
        await self.rate_limiter.wait()
        headers = {"Content-Type": kind, "Accept": "application/json", **await self._credentials()}
        if verb != "GET" and not self.may_write():  # last of all, for one's turn may be a minute away
            raise NotLeader("the Lease is not ours any more")
        url = self.client.configuration.host + path
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                answer = await self._request(verb, url, headers, body, TIMEOUT_SECONDS)
                text = await answer.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            self.on_response(verb, 0)
            raise ApiError(0, f"the API server does not answer: {str(error) or type(error).__name__}") from error
        self.on_response(verb, answer.status)
        if answer.status >= HTTPStatus.BAD_REQUEST:
            raise self._api_error(answer.status, text, answer.headers.get("Retry-After"))
        self.rate_limiter.speed_up()
        return _read(text)

    async def _request(self, verb: str, url: str, headers: dict[str, str], body: Object | None, limit: Any) -> Any:
        ask: Any = self.client.rest_client.request
        return await ask(verb, url, headers, body, _request_timeout=limit)

    async def _credentials(self) -> dict[str, str]:
        settings = await self.client.configuration.auth_settings()
        token = settings.get("BearerToken")
        return {"Authorization": str(token["value"])} if token else {}

    def _api_error(self, status: int, text: bytes, retry_after: str | None) -> ClusterError:
        try:
            said = json.loads(text)
        except (ValueError, RecursionError):  # a proxy in between
            said = {}
        message = str(said.get("message") or text[:500].decode(errors="replace") or f"HTTP {status}")
        reason, details = str(said.get("reason") or ""), said.get("details")
        if status == HTTPStatus.TOO_MANY_REQUESTS or retry_after:
            self.rate_limiter.back_off(float(retry_after) if retry_after and retry_after.isdigit() else 1.0)
        if status == HTTPStatus.CONFLICT:
            return AlreadyExists(status, message, reason) if reason == "AlreadyExists" else Conflict(message)
        return ApiError(status, message, reason, details if isinstance(details, dict) else None)


def _read(text: bytes) -> Object:
    try:
        found: Object = json.loads(text)
    except (ValueError, RecursionError) as error:  # a proxy in between, or an object deeper than we can read
        raise ApiError(0, f"the API server's answer cannot be read: {error}") from error
    return found


async def load_configuration(context: str | None = None) -> Configuration:
    """Load the pod's own credentials, or a kubeconfig's. Raises ClusterError where there are none."""
    found = Configuration()
    try:
        if context is None:
            try:
                load_own: Any = config.load_incluster_config
                load_own(client_configuration=found)
            except config.ConfigException:
                pass
            else:
                return found
        load_file: Any = config.load_kube_config
        await load_file(context=context, client_configuration=found)
    except (config.ConfigException, OSError) as error:
        raise ClusterError(f"no credentials for a cluster: {error}; set KUBECONFIG or name a --context") from error
    return found


@asynccontextmanager
async def open_client(settings: Configuration, **more: Any) -> AsyncIterator[KubernetesClient]:
    """Have a client for a while."""
    async with ApiClient(settings) as client:
        yield KubernetesClient(client, **more)
