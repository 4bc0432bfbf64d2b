"""`finetune card` on a cluster."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from importlib.metadata import version

from finetune_cli.card.record import RunRecord
from finetune_cli.cluster.get import port_forward
from finetune_cli.cluster.logs import samples_in_logs
from finetune_cli.cluster.session import ClusterSession, connect
from finetune_cli.diagnostics import UsageError
from finetune_cli.local.card_file import write_card
from finetune_cli.output.metrics import TRAIN
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.kubernetes.translate.api_errors import ApiError
from finetune_trainer.contract.sample_rows import SampleRow


def run(arguments: argparse.Namespace) -> int:
    """Write the card."""
    if not arguments.name:
        raise UsageError("name the pipeline, as in: finetune card NAME")
    record = asyncio.run(_record(arguments))
    write_card(record, arguments.output)
    return 0


async def _record(arguments: argparse.Namespace) -> RunRecord:
    async with connect(arguments) as session:
        return await record_of(session)


async def record_of(session: ClusterSession) -> RunRecord:
    """Return all that the card shows of a pipeline."""
    pipeline = await session.get_pipeline()
    return RunRecord(
        pipeline,
        samples=await _samples(session, pipeline),
        serve_commands=_serve_commands(pipeline),
        reproduce_command=f"kubectl apply -n {pipeline.key.namespace} -f pipeline.yaml",
        at=datetime.now(UTC),  # noqa: TID251  an edge
        version=version("finetune-operator"),
    )


async def _samples(session: ClusterSession, pipeline: Pipeline) -> list[SampleRow]:
    """Return the samples in the logs of pods; none without train.samples, and without the right to read logs."""
    stage = pipeline.status.stages.get(TRAIN)
    if pipeline.spec.train.samples is None or stage is None:
        return []
    try:
        return await samples_in_logs(session, stage)
    except ApiError as error:
        if error.status != HTTPStatus.FORBIDDEN:
            raise
        text = "the card has no samples: you may not read the logs of pods in this namespace"
        print(text, file=sys.stderr)
        return []


def _serve_commands(pipeline: Pipeline) -> Sequence[str]:
    """Return the command that leads to the server; none without a server."""
    model = pipeline.status.model
    if model is None or not model.endpoint:
        return ()
    forward = port_forward(pipeline, model.endpoint)
    return (forward, "curl localhost:8000/v1/models")
