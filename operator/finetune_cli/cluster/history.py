"""`finetune list --history` on a cluster: the newest generation of each pipeline, which is all that a status keeps."""

import argparse
import asyncio
import json
from datetime import UTC, datetime

from finetune_cli.cluster.session import connect
from finetune_cli.comparison.compare import Run
from finetune_cli.local.generations import spec_of
from finetune_cli.output.history_lines import history_lines
from finetune_operator.api.group import API_VERSION, KIND
from finetune_operator.errors import InvalidObject
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.pipeline_object import parse_pipeline

NEWEST_ONLY = "a cluster keeps what was measured of the newest generation only: give each setting a pipeline of its own"


def run(arguments: argparse.Namespace) -> int:
    """Print the newest generation of each pipeline."""
    return asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    async with connect(arguments) as session:
        namespace: str | None = session.context.namespace
        if arguments.all_namespaces:
            namespace = None
        objects = [item async for item in session.api.list(paths.pipelines(namespace))]
    if arguments.json:
        listed = {"apiVersion": API_VERSION, "kind": f"{KIND}List", "items": objects}
        print(json.dumps(listed, indent=1))
        return 0
    histories = []
    for item in objects:
        try:
            pipeline = parse_pipeline(item)
        except InvalidObject:
            # `finetune list` shows it, with the reason.
            continue
        name = f"{pipeline.key.name}@{pipeline.generation}"
        if namespace is None:
            name = f"{pipeline.key.namespace}/{name}"
        histories.append([Run(name, spec_of(pipeline), pipeline.status)])
    now = datetime.now(UTC)  # noqa: TID251  an edge
    for line in history_lines(histories, now):
        print(line)
    print(NEWEST_ONLY)
    return 0
