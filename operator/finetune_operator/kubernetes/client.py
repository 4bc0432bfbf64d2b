"""A client of the API server: JSON in, JSON out, with a timeout, a limited request rate and the operator's errors."""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration

from finetune_operator.errors import ClusterError, Conflict
from finetune_operator.kubernetes import fast_json
from finetune_operator.kubernetes.token_bucket import TokenBucket
from finetune_operator.kubernetes.translate.api_errors import AlreadyExists, ApiError
from finetune_operator.kubernetes.translate.object import Object

TIMEOUT_SECONDS = 15.0
"""For a whole request and its response; a log stream is limited while it connects only."""
WATCH_GRACE_SECONDS = 4.0
"""Time after which a watch that the API server should have ended is dead."""
SILENCE_SECONDS = 90.0
"""Time without an event or a bookmark after which a watch is dead."""
# A page of the largest pipelines that a user can create has 55 MB.
PAGE = 100
"""Objects in a page of a list."""
# Less than the client waits: after its timeout no write lands late.
WRITE_TIMEOUT_SECONDS = 10
"""Time for which the API server works on a write."""
USER_AGENT = "finetune-operator"


class NotLeader(ClusterError):
    """Another replica may be the leader by now, so nothing is written."""


class KubernetesClient:
    """Verbs on paths of the API server.

    `seconds_to_write` is called before each request that changes something: for so long this replica is surely the
    leader. `on_response` gets the verb and the status of each response, 0 for none.
    """

    def __init__(
        self,
        client: ApiClient,
        seconds_to_write: Callable[[], float] = lambda: math.inf,
        on_response: Callable[[str, int], None] = lambda _verb, _status: None,
        rate_limiter: TokenBucket | None = None,
    ) -> None:
        self.client = client
        self.seconds_to_write = seconds_to_write
        self.on_response = on_response
        self.rate_limiter = rate_limiter or TokenBucket()
        self._writes = 0
        """Requests under way that change something."""
        self._no_writes = asyncio.Event()

    async def get(self, path: str) -> Object | None:
        """Return an object, or None if it does not exist."""
        try:
            return await self._send("GET", path)
        except ApiError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    async def list(self, path: str, **query: str) -> AsyncIterator[Object]:
        """Yield all objects of a collection."""
        async for page in self.pages(path, **query):
            for item in page["items"]:
                yield item

    async def pages(self, path: str, **query: str) -> AsyncIterator[Object]:
        """Yield a collection page by page, as the API server returns it."""
        limit = {"limit": str(PAGE)}
        more: dict[str, str] = limit
        while more:
            page = await self._send("GET", f"{path}?{urlencode({**query, **more})}")
            yield page
            token = page["metadata"].get("continue")
            more = {**limit, "continue": token} if token else {}

    async def watch(
        self, path: str, resource_version: str, seconds: int, **query: str
    ) -> AsyncIterator[Object]:
        """Yield the events since a resource version, for at most this long; end early if the API server closes.

        Raises ApiError, with status 410 if the version is too old.
        """
        query |= {
            "watch": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(seconds),
        }
        lines = self._stream(path, **query, allowWatchBookmarks="true")
        try:
            # The API server ends the watch in time, and sends a bookmark each minute. A connection that is silently
            # dead does neither.
            loop = asyncio.get_running_loop()
            end = loop.time() + seconds
            async with asyncio.timeout(
                min(seconds, SILENCE_SECONDS) + WATCH_GRACE_SECONDS
            ) as limit:
                async for line in lines:
                    silent_until = min(end, loop.time() + SILENCE_SECONDS)
                    limit.reschedule(silent_until + WATCH_GRACE_SECONDS)
                    if line:
                        yield self._watch_event(line)
        except TimeoutError as error:
            raise ApiError(
                0,
                f"the watch of {path} was silent and did not end within its {seconds} s",
            ) from error
        finally:
            await lines.aclose()

    def _watch_event(self, line: bytes) -> Object:
        event = _parse(line)
        if event.get("type") == "ERROR":
            status = event.get("object") or {}
            code = int(status.get("code") or 0)
            message = f"the watch ended with an error: {status.get('message') or 'no message'}"
            raise ApiError(code, message, str(status.get("reason") or ""))
        return event

    async def create(self, path: str, body: Object, **query: str) -> Object:
        """Create an object. Raises AlreadyExists if the name is taken, ApiError for an unknown field."""
        # Strict: the API server would drop a field that it does not know, and the object would lack it.
        query = {"fieldValidation": "Strict", **query}
        return await self._send("POST", f"{path}?{urlencode(query)}", body)

    async def replace(self, path: str, body: Object) -> Object:
        """Replace an object. Raises Conflict if it has changed since its resourceVersion."""
        return await self._send("PUT", path, body)

    async def patch(self, path: str, body: Object, **query: str) -> Object:
        """Apply a JSON merge patch: null removes a field."""
        if query:
            path = f"{path}?{urlencode(query)}"
        return await self._send("PATCH", path, body, "application/merge-patch+json")

    async def apply(
        self, path: str, body: Object, manager: str = "finetune-operator", **query: str
    ) -> Object:
        """Apply on the server's side, as the owner of only these fields."""
        query = {"fieldManager": manager, "force": "true", **query}
        return await self._send(
            "PATCH", f"{path}?{urlencode(query)}", body, "application/apply-patch+yaml"
        )

    async def stream_lines(
        self, path: str, body: Object | None = None, **query: str
    ) -> AsyncGenerator[str]:
        """Yield a text line by line as it arrives, without line ends and without a time limit. Raises ApiError.

        With a body, the request is a POST.
        """
        async with aclosing(self._stream(path, body, **query)) as lines:
            async for line in lines:
                yield line.decode(errors="replace")

    async def _stream(
        self, path: str, body: Object | None = None, **query: str
    ) -> AsyncGenerator[bytes]:
        verb = "GET" if body is None else "POST"
        no_end = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_SECONDS)
        rest = b""
        try:
            url = f"{self.client.configuration.host}{path}?{urlencode(query)}"
            headers = {
                "Accept": "*/*",
                "User-Agent": USER_AGENT,
                **await self._credentials(),
            }
            response = await self._request(verb, url, headers, body, no_end)
            self.on_response(verb, response.status)
            if response.status >= HTTPStatus.BAD_REQUEST:
                raise self._api_error(
                    response.status,
                    await response.read(),
                    response.headers.get("Retry-After"),
                )
            try:
                async for piece in response.response.content.iter_any():
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        yield line
            finally:
                response.response.close()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ApiError(
                0,
                f"the API server does not answer: {str(error) or type(error).__name__}",
            ) from error
        if rest:
            yield rest

    async def delete(
        self,
        path: str,
        propagation: str = "Background",
        options: Object | None = None,
        **preconditions: str,
    ) -> None:
        """Delete an object if it exists; with preconditions, only the object of that uid or resourceVersion.

        `options` are further fields of DeleteOptions.
        """
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": propagation,
            **(options or {}),
        }
        if preconditions:
            options["preconditions"] = preconditions
        try:
            await self._send("DELETE", path, options)
        except ApiError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise

    async def wait_for_writes(self) -> None:
        """Wait until the API server works on no write; it does so for `WRITE_TIMEOUT_SECONDS` at most."""
        while self._writes:
            self._no_writes.clear()
            await self._no_writes.wait()

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        self._writes += 1
        try:
            yield
        except asyncio.CancelledError:
            # The API server goes on with the write after its client has left.
            asyncio.get_running_loop().call_later(
                WRITE_TIMEOUT_SECONDS, self._end_write
            )
            raise
        except BaseException:
            self._end_write()
            raise
        self._end_write()

    def _end_write(self) -> None:
        self._writes -= 1
        if not self._writes:
            self._no_writes.set()

    async def _send(
        self,
        verb: str,
        path: str,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        await self.rate_limiter.wait()
        headers = {
            "Content-Type": content_type,
            "Accept": "application/json",
            "User-Agent": USER_AGENT,
        }
        headers |= await self._credentials()
        is_read = verb == "GET"
        limit = TIMEOUT_SECONDS
        if not is_read:
            # After the rate limiter, which may hold a request back for seconds: the Lease may be lost by then.
            limit = min(limit, self.seconds_to_write())
            if limit <= 0:
                raise NotLeader(
                    "this replica no longer holds the Lease, so it does not write"
                )
            path = _with_timeout(path, limit)
        url = self.client.configuration.host + path
        try:
            with nullcontext() if is_read else self._under_way():
                async with asyncio.timeout(limit):
                    response = await self._request(
                        verb, url, headers, body, TIMEOUT_SECONDS
                    )
                    content = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            self.on_response(verb, 0)
            raise ApiError(
                0,
                f"the API server does not answer: {str(error) or type(error).__name__}",
            ) from error
        self.on_response(verb, response.status)
        if response.status >= HTTPStatus.BAD_REQUEST:
            raise self._api_error(
                response.status, content, response.headers.get("Retry-After")
            )
        return _parse(content)

    async def _request(
        self,
        verb: str,
        url: str,
        headers: dict[str, str],
        body: Object | None,
        limit: Any,
    ) -> Any:
        send: Any = self.client.rest_client.request
        return await send(verb, url, headers, body, _request_timeout=limit)

    async def _credentials(self) -> dict[str, str]:
        settings = await self.client.configuration.auth_settings()
        token = settings.get("BearerToken")
        if not token:
            return {}
        return {"Authorization": str(token["value"])}

    def _api_error(
        self, status: int, content: bytes, retry_after: str | None
    ) -> ClusterError:
        try:
            body = fast_json.decode(content)
        except (ValueError, RecursionError):
            # The page of a proxy in between.
            body = {}
        if not isinstance(body, dict):
            body = {}
        text = content[:500].decode(errors="replace")
        message = str(body.get("message") or text or f"HTTP {status}")
        reason = str(body.get("reason") or "")
        if status == HTTPStatus.TOO_MANY_REQUESTS or retry_after:
            # The header may also be a date: then the shortest pause is taken.
            seconds = 1.0
            if retry_after and retry_after.isdecimal():
                seconds = float(retry_after)
            self.rate_limiter.pause(seconds)
        if status == HTTPStatus.CONFLICT and reason == "AlreadyExists":
            return AlreadyExists(status, message, reason)
        if status == HTTPStatus.CONFLICT:
            return Conflict(message)
        details = body.get("details")
        if not isinstance(details, dict):
            details = None
        return ApiError(status, message, reason, details)


def _with_timeout(path: str, limit: float) -> str:
    """Add the time for which the API server works on a write; whole seconds, at least 1."""
    seconds = max(1, math.floor(min(limit, WRITE_TIMEOUT_SECONDS)))
    separator = "&" if "?" in path else "?"
    return f"{path}{separator}timeout={seconds}s"


def _parse(content: bytes) -> Object:
    try:
        value: Any = fast_json.decode(content)
    except (ValueError, RecursionError) as error:
        # The page of a proxy in between, or an object that is nested too deeply.
        raise ApiError(
            0, f"the API server's response cannot be parsed as JSON: {error}"
        ) from error
    if not isinstance(value, dict):
        raise ApiError(
            0, "the API server's response cannot be parsed: it is no JSON object"
        )
    return value


@asynccontextmanager
async def open_client(
    settings: Configuration, **options: Any
) -> AsyncIterator[KubernetesClient]:
    """Open a client and close its connections at the end; `options` are KubernetesClient's."""
    async with ApiClient(settings) as client:
        yield KubernetesClient(client, **options)
