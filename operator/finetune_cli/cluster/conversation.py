"""A conversation with the model that a pipeline serves on a cluster, through the API server's proxy."""

import argparse
import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from finetune_cli.cluster.get import HTTP_PORT
from finetune_cli.cluster.session import connect
from finetune_cli.conversation import TRAINED, ModelConversation
from finetune_cli.diagnostics import UsageError
from finetune_cli.local.published import has_turns
from finetune_operator.core.metadata import service_name
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.kubernetes import paths


def open_conversation(
    arguments: argparse.Namespace, max_tokens: int
) -> ModelConversation:
    """Return a conversation; raise UsageError if the pipeline has no server, or ClusterError."""
    pipeline = asyncio.run(_pipeline(arguments))
    model = pipeline.status.model
    if model is None or not model.endpoint:
        raise UsageError(
            f"{pipeline.key} serves no model: wait until its stage deploy has succeeded, "
            f"or add spec.deploy to its manifest"
        )
    port = urlsplit(model.endpoint).port or HTTP_PORT
    endpoint = ServiceEndpoint(arguments, pipeline, port)
    return ModelConversation(TRAINED, endpoint, has_turns(pipeline), max_tokens)


async def _pipeline(arguments: argparse.Namespace) -> Pipeline:
    async with connect(arguments) as session:
        return await session.get_pipeline()


@dataclass(frozen=True)
class ServiceEndpoint:
    """The Service of a pipeline's server. Each request has a connection of its own: a conversation may take hours."""

    arguments: argparse.Namespace
    pipeline: Pipeline
    port: int

    def get(self, path: str) -> Any:
        """Return the JSON at a path; raise ClusterError or UsageError."""

        async def answer() -> Any:
            async with connect(self.arguments) as session:
                return await session.api.get(self._proxy(path))

        return asyncio.run(answer())

    def post(self, path: str, body: Mapping[str, Any]) -> Iterator[str]:
        """Yield the lines of the response as they arrive; raise ClusterError or UsageError."""
        lines = self._lines(path, body)

        async def next_line() -> str | None:
            return await anext(lines, None)

        with asyncio.Runner() as runner:
            try:
                line = runner.run(next_line())
                while line is not None:
                    yield line
                    line = runner.run(next_line())
            finally:
                runner.run(lines.aclose())

    async def _lines(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[str, None]:
        async with connect(self.arguments) as session:
            lines = session.api.stream_lines(self._proxy(path), dict(body))
            async with aclosing(lines):
                async for line in lines:
                    yield line

    def _proxy(self, path: str) -> str:
        key = self.pipeline.key
        return paths.service_proxy(
            key.namespace, service_name(key.name), self.port, path.removeprefix("/")
        )
