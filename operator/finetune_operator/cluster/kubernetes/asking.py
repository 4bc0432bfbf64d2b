"""Pods are asked over HTTP, and what they say is not ours to trust."""

from http import HTTPStatus
from typing import Any

import aiohttp

from finetune_operator.cluster.kubernetes.pod import Pod

LARGEST = 256 << 10
"""Bytes read of an answer, unless less is asked for; what is longer is cut."""
CONNECT_SECONDS = 10.0


async def ask(session: aiohttp.ClientSession, url: str, body: Any = None, most: int = LARGEST) -> tuple[int, bytes]:
    """Get a page, or post a body as JSON; gives status and content. Raises aiohttp.ClientError, OSError.

    Redirects are not followed: a pod would choose whom the operator talks to. How long it may take is the caller's.
    """
    patience = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
    method = "GET" if body is None else "POST"
    async with session.request(method, url, json=body, allow_redirects=False, timeout=patience) as answer:
        content = bytearray()
        async for piece in answer.content.iter_any():
            content += piece
            if len(content) >= most:
                break
        return answer.status, bytes(content[:most])


def ok(status: int) -> bool:
    """Whether there is an answer in the content."""
    return status == HTTPStatus.OK


def host_of(pod: Pod) -> str:
    """Give its address as URLs have it."""
    return f"[{pod.address}]" if ":" in pod.address else pod.address
