"""A connection to a cluster, and one pipeline in it."""

import argparse
import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

from finetune_cli.arguments import is_manifest, overrides
from finetune_cli.cluster.api_errors import describe_api_error
from finetune_cli.cluster.kubeconfig import KubeContext, read_context
from finetune_cli.diagnostics import UsageError, closest_match
from finetune_cli.manifest.manifest import Manifest, read
from finetune_cli.manifest.messages.messages import PATTERNS
from finetune_operator.api.names import DNS_LABEL, DNS_SUBDOMAIN
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.client import KubernetesClient, open_client
from finetune_operator.kubernetes.configuration import load_configuration
from finetune_operator.kubernetes.pipeline_object import parse_pipeline
from finetune_operator.kubernetes.translate.api_errors import ApiError

Object = dict[str, Any]
"""An object of the API server as JSON."""
T = TypeVar("T")
# An API server restarts within this time, and a command that waits for hours must survive that.
API_RETRY_SECONDS = 60.0
"""How long requests that fail are retried while a command waits for or follows a pipeline."""
POLL_SECONDS = 1.0
"""Interval at which a command that waits or follows reads the pipeline."""


@dataclass(frozen=True)
class ClusterSession:
    """A connection to a cluster, with the selected pipeline; `name` is empty if none is selected."""

    api: KubernetesClient
    context: KubeContext
    name: str = ""
    manifest: Manifest | None = None
    """Set if the argument is a manifest file."""

    @property
    def key(self) -> Key:
        """Namespace and name of the pipeline."""
        return Key(self.context.namespace, self.name)

    async def get_object(self) -> Object:
        """Return the object from the API server; raises UsageError if it does not exist."""
        pipeline = await self.api.get(paths.pipeline(self.key))
        if pipeline is None:
            raise UsageError(await self._not_found_message())
        return pipeline

    async def get_pipeline(self) -> Pipeline:
        """Return the parsed object; raises UsageError if it does not exist."""
        return parse_pipeline(await self.get_object())

    async def _not_found_message(self) -> str:
        namespace = self.context.namespace
        path = paths.pipelines(namespace)
        names = [pipeline["metadata"]["name"] async for pipeline in self.api.list(path)]
        message = f"there is no pipeline {self.name} in the namespace {namespace}"
        if not names:
            return f"{message}, which has no pipelines; choose another with -n, or list all with `finetune get -A`"
        match = closest_match(self.name, names)
        if match:
            return f"{message}; did you mean {match}?"
        # A namespace may have hundreds.
        return f"{message}; its pipelines are {', '.join(sorted(names)[:10])}"


@asynccontextmanager
async def connect(arguments: argparse.Namespace) -> AsyncIterator[ClusterSession]:
    """Connect to the cluster that the arguments select; its errors are raised as UsageError or ClusterError."""
    name = arguments.name or ""
    manifest = None
    if name and is_manifest(name):
        manifest = read(Path(name), overrides(arguments))
        name = manifest.name
    elif overrides(arguments):
        raise UsageError(
            f"--set changes a manifest: name its FILE in place of the pipeline {name}"
        )
    async with open_session(
        name, manifest, context=arguments.context, namespace=arguments.namespace
    ) as session:
        yield session


@asynccontextmanager
async def open_session(
    name: str,
    manifest: Manifest | None = None,
    *,
    context: str | None = None,
    namespace: str | None = None,
) -> AsyncIterator[ClusterSession]:
    """Connect to the cluster of a kubeconfig context, by default of the current context."""
    # Checked here, because the name becomes a part of the API's paths.
    if name and not re.fullmatch(DNS_SUBDOMAIN, name):
        raise UsageError(
            f"{name!r} is neither a file nor a pipeline's name: a name {PATTERNS[DNS_SUBDOMAIN]}"
        )
    # Without any of these, a name may be meant for a run on this machine.
    names_cluster = context or namespace or manifest
    chosen = read_context(context, "" if names_cluster else name)
    own_namespace = _namespace(namespace, manifest)
    if own_namespace:
        chosen = KubeContext(chosen.name, own_namespace)
    try:
        async with open_client(await load_configuration(chosen.name)) as api:
            yield ClusterSession(api, chosen, name, manifest)
    except ApiError as error:
        raise describe_api_error(error, chosen) from error


def _namespace(given: str | None, manifest: Manifest | None) -> str | None:
    """Return the namespace of -n or of the manifest; raises UsageError if they differ."""
    if given and not re.fullmatch(DNS_LABEL, given):
        raise UsageError(f"--namespace {given!r}: {PATTERNS[DNS_LABEL]}")
    if manifest is None:
        return given
    # From the body: the parsed manifest has a default, which must not replace the context's namespace.
    in_manifest: str | None = manifest.body["metadata"].get("namespace")
    if given and in_manifest and given != in_manifest:
        raise UsageError(
            f"-n {given} contradicts metadata.namespace {in_manifest} in {manifest.path}; remove or change one"
        )
    return given or in_manifest


async def with_retries(request: Callable[[], Awaitable[T]]) -> T:
    """Retry a request for API_RETRY_SECONDS on connection errors, 429 and 5xx; other errors are raised at once."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + API_RETRY_SECONDS
    while True:
        try:
            return await request()
        except ApiError as error:
            if not _is_temporary(error) or loop.time() > deadline:
                raise
        await asyncio.sleep(POLL_SECONDS)


def _is_temporary(error: ApiError) -> bool:
    # Status 0: there was no response.
    if error.status in {0, HTTPStatus.TOO_MANY_REQUESTS}:
        return True
    return error.status >= HTTPStatus.INTERNAL_SERVER_ERROR


async def refresh(session: ClusterSession) -> Pipeline:
    """Read a known pipeline again; raises ClusterError if it was deleted."""
    pipeline = await with_retries(lambda: session.api.get(paths.pipeline(session.key)))
    if pipeline is None:
        raise ClusterError(
            f"{session.name} no longer exists: a user or spec.whenExpired: Delete may have deleted it"
        )
    return parse_pipeline(pipeline)
