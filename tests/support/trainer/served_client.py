"""The client of the API server, connected to a server that runs a test's handler."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from kubernetes.aio.client import Configuration
from support.http_server import serve_http

from finetune_operator.kubernetes.client import KubernetesClient, open_client

Handler = Callable[[web.Request], web.StreamResponse]


@asynccontextmanager
async def client_of(handler, **options):
    """Serve requests with the handler, and yield a client of that server."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = handler(request)
        return await response if asyncio.iscoroutine(response) else response

    async with serve_http(handle) as port:
        settings = Configuration()
        settings.host = f"http://127.0.0.1:{port}"
        async with open_client(settings, **options) as api:
            yield api


def call(handler, request: Callable[[KubernetesClient], Awaitable[Any]], **options):
    """Send one request to the handler; return the result and the client."""

    async def scenario():
        async with client_of(handler, **options) as api:
            return await request(api), api

    return asyncio.run(asyncio.wait_for(scenario(), 30))


def rejecting(
    status: int, reason: str = "", message: str = "no", **headers: str
) -> Handler:
    return lambda _: web.json_response(
        {"reason": reason, "message": message}, status=status, headers=headers
    )
