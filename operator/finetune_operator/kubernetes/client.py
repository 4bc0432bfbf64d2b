"""A client of the API server: JSON in, JSON out, with a timeout, an adaptive request rate and the operator's errors."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from finetune_operator.errors import ClusterError, Conflict
from finetune_operator.kubernetes.translate.api_errors import AlreadyExists, ApiError

Object = dict[str, Any]
TIMEOUT_SECONDS = 15.0
"""For a whole request and its response; a log stream has it for the connection only."""
PAGE = 500
"""Objects in one page of a list."""
HALVED_SECONDS = 1.0
"""Shortest time between two halvings: all requests in flight get the same 429, and it counts once."""


class NotLeader(ClusterError):
    """Another replica may be the leader by now, so nothing is written."""


class RateLimiter:
    """Requests per second: plus one for every hundred successful responses, halved after a 429."""

    MIN_RATE, MAX_RATE = 1.0, 200.0
    """Requests per second."""

    def __init__(self, rate: float = 50.0) -> None:
        self.rate, self._next, self._halved_until = rate, 0.0, 0.0

    async def wait(self) -> None:
        """Wait until the rate allows the next request."""
        now = asyncio.get_running_loop().time()
        start = max(now, self._next)
        self._next = start + 1 / self.rate
        await asyncio.sleep(start - now)

    def speed_up(self) -> None:
        """Raise the rate after a successful response."""
        self.rate = min(self.MAX_RATE, self.rate + 0.01)

    def back_off(self, seconds: float) -> None:
        """Halve the rate and delay all requests by this many seconds.

        Requests that were in flight get the same 429; it halves the rate once.
        """
        now = asyncio.get_running_loop().time()
        if now >= self._halved_until:
            self.rate = max(self.MIN_RATE, self.rate / 2)
            self._halved_until = now + max(seconds, HALVED_SECONDS)
        self._next = max(self._next, now + seconds)


class KubernetesClient:
    """Verbs on paths of the API server.

    `may_write` is called before each request that changes something. `on_response` gets the verb and the status of
    each response, 0 for none.
    """

    def __init__(
        self,
        client: ApiClient,
        may_write: Callable[[], bool] = lambda: True,
        on_response: Callable[[str, int], None] = lambda _verb, _status: None,
    ) -> None:
        self.client, self.may_write, self.on_response = client, may_write, on_response
        self.rate_limiter = RateLimiter()

    async def get(self, path: str) -> Object | None:
        """Return an object, or None where it does not exist."""
        try:
            return await self._send("GET", path)
        except ApiError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    async def list(self, path: str, **query: str) -> AsyncIterator[Object]:
        """Yield all objects of a collection, page by page."""
        more: dict[str, str] = {"limit": str(PAGE)}
        while more:
            page = await self._send("GET", f"{path}?{urlencode({**query, **more})}")
            for item in page["items"]:
                yield item
            token = page["metadata"].get("continue")
            more = {"limit": str(PAGE), "continue": token} if token else {}

    async def create(self, path: str, body: Object) -> Object:
        """Create an object. Raises AlreadyExists where the name is taken, ApiError for an unknown field."""
        return await self._send("POST", f"{path}?fieldValidation=Strict", body)

    async def replace(self, path: str, body: Object) -> Object:
        """Replace an object. Raises Conflict where it has changed since its resourceVersion."""
        return await self._send("PUT", path, body)

    async def patch(self, path: str, body: Object, **query: str) -> Object:
        """Apply a JSON merge patch: null removes a field."""
        where = f"{path}?{urlencode(query)}" if query else path
        return await self._send("PATCH", where, body, "application/merge-patch+json")

    async def apply(self, path: str, body: Object, manager: str = "finetune-operator", **query: str) -> Object:
        """Apply on the server's side, as the owner of just these fields."""
        where = f"{path}?{urlencode({'fieldManager': manager, 'force': 'true', **query})}"
        return await self._send("PATCH", where, body, "application/apply-patch+yaml")

    async def stream_lines(self, path: str, **query: str) -> AsyncIterator[str]:
        """Yield a text line by line as it arrives, without line ends and without a time limit. Raises ApiError."""
        no_end = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_SECONDS)
        rest = b""
        try:
            url = f"{self.client.configuration.host}{path}?{urlencode(query)}"
            response = await self._request("GET", url, {"Accept": "*/*", **await self._credentials()}, None, no_end)
            self.on_response("GET", response.status)
            if response.status >= HTTPStatus.BAD_REQUEST:
                raise self._api_error(response.status, await response.read(), response.headers.get("Retry-After"))
            try:
                async for piece in response.response.content.iter_any():
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        yield line.decode(errors="replace")
            finally:
                response.response.close()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ApiError(0, f"the API server does not answer: {str(error) or type(error).__name__}") from error
        if rest:
            yield rest.decode(errors="replace")

    async def delete(self, path: str, propagation: str = "Background", uid: str | None = None) -> None:
        """Delete an object if it exists; with a uid, only the object of that uid."""
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": propagation}
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            await self._send("DELETE", path, options)
        except ApiError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise

    async def _send(
        self, verb: str, path: str, body: Object | None = None, content_type: str = "application/json"
    ) -> Object:
        await self.rate_limiter.wait()
        headers = {"Content-Type": content_type, "Accept": "application/json", **await self._credentials()}
        # After the rate limiter, which may hold a request back for a minute: the Lease may be lost by then.
        if verb != "GET" and not self.may_write():
            raise NotLeader("this replica no longer holds the Lease, so it does not write")
        url = self.client.configuration.host + path
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                response = await self._request(verb, url, headers, body, TIMEOUT_SECONDS)
                content = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            self.on_response(verb, 0)
            raise ApiError(0, f"the API server does not answer: {str(error) or type(error).__name__}") from error
        self.on_response(verb, response.status)
        if response.status >= HTTPStatus.BAD_REQUEST:
            raise self._api_error(response.status, content, response.headers.get("Retry-After"))
        self.rate_limiter.speed_up()
        return _parse(content)

    async def _request(self, verb: str, url: str, headers: dict[str, str], body: Object | None, limit: Any) -> Any:
        send: Any = self.client.rest_client.request
        return await send(verb, url, headers, body, _request_timeout=limit)

    async def _credentials(self) -> dict[str, str]:
        settings = await self.client.configuration.auth_settings()
        token = settings.get("BearerToken")
        return {"Authorization": str(token["value"])} if token else {}

    def _api_error(self, status: int, content: bytes, retry_after: str | None) -> ClusterError:
        try:
            body = json.loads(content)
        except (ValueError, RecursionError):  # a page of a proxy in between
            body = {}
        message = str(body.get("message") or content[:500].decode(errors="replace") or f"HTTP {status}")
        reason, details = str(body.get("reason") or ""), body.get("details")
        if status == HTTPStatus.TOO_MANY_REQUESTS or retry_after:
            self.rate_limiter.back_off(float(retry_after) if retry_after and retry_after.isdigit() else 1.0)
        if status == HTTPStatus.CONFLICT:
            return AlreadyExists(status, message, reason) if reason == "AlreadyExists" else Conflict(message)
        return ApiError(status, message, reason, details if isinstance(details, dict) else None)


def _parse(content: bytes) -> Object:
    try:
        found: Object = json.loads(content)
    except (ValueError, RecursionError) as error:  # a page of a proxy in between, or an object nested too deeply
        raise ApiError(0, f"the API server's response cannot be parsed as JSON: {error}") from error
    return found


async def load_configuration(context: str | None = None) -> Configuration:
    """Load the pod's own credentials, or those of a kubeconfig. Raises ClusterError where there are none."""
    found = Configuration()
    try:
        if context is None:
            try:
                load_in_cluster: Any = config.load_incluster_config
                load_in_cluster(client_configuration=found)
            except config.ConfigException:
                pass
            else:
                return found
        load_file: Any = config.load_kube_config
        await load_file(context=context, client_configuration=found)
    except (config.ConfigException, OSError) as error:
        raise ClusterError(f"no credentials for a cluster: {error}; set KUBECONFIG or pass --context") from error
    return found


@asynccontextmanager
async def open_client(settings: Configuration, **options: Any) -> AsyncIterator[KubernetesClient]:
    """Open a client and close its connections at the end; `options` are KubernetesClient's."""
    async with ApiClient(settings) as client:
        yield KubernetesClient(client, **options)
