"""A pipeline on a cluster. Each call connects anew; imported only for clusters, as the Kubernetes client is."""

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TypeVar

from typing_extensions import override

from finetune.run import PipelineRun, RunState
from finetune.threads import in_thread
from finetune_cli.card.record import RunRecord
from finetune_cli.cluster import annotate, apply_forecast
from finetune_cli.cluster.apply import apply as apply_manifest
from finetune_cli.cluster.card import record_of
from finetune_cli.cluster.compare import NO_QUESTIONS
from finetune_cli.cluster.get import tree
from finetune_cli.cluster.session import ClusterSession, open_session, with_retries
from finetune_cli.cluster.wait import summary
from finetune_cli.comparison.compare import Run
from finetune_cli.local.generations import spec_of
from finetune_cli.manifest.manifest import Manifest
from finetune_cli.outcome import exit_code_of_wait
from finetune_cli.output.forecast_lines import PlanReport
from finetune_cli.output.metrics import TRAIN, Cells, rows_of_curve
from finetune_operator.core.pipeline import Pipeline
from finetune_operator.kubernetes import paths

T = TypeVar("T")


class ClusterPipelineRun(PipelineRun):
    """A pipeline on a cluster."""

    poll_seconds = 2.0

    def __init__(self, name: str, context: str | None, namespace: str | None) -> None:
        super().__init__(name, context=context, namespace=namespace)
        self.context = context
        self.namespace = namespace

    def _ask(self, question: Callable[[ClusterSession], Awaitable[T]]) -> T:
        return _ask(question, self.name, None, self.context, self.namespace)

    def _pipeline(self) -> Pipeline:
        async def read(session: ClusterSession) -> Pipeline:
            return await with_retries(session.get_pipeline)

        return self._ask(read)

    @override
    def state(self) -> RunState:
        pipeline = self._pipeline()
        now = datetime.now(UTC)  # noqa: TID251  an edge
        code = exit_code_of_wait(pipeline, "Finished")
        return RunState(
            pipeline.status, code, summary(pipeline), tree(pipeline, {}, now)
        )

    @override
    def metrics(self) -> list[Cells]:
        train = self.status.stages.get(TRAIN)
        if train is None or train.loss_curve is None:
            return []
        return rows_of_curve(train.loss_curve)

    @override
    def stop(self) -> None:
        request = argparse.Namespace(command="stop", name=self.name, **self.selection)
        in_thread(lambda: annotate.run(request))

    @override
    def stop_own(self) -> None:
        """Leave the pipeline as it is: the operator works on it, and not this process."""

    @override
    def measured(self) -> Run:
        pipeline = self._pipeline()
        spec = spec_of(pipeline)
        return Run(self.name, spec, pipeline.status, without_questions=NO_QUESTIONS)

    @override
    def record(self) -> RunRecord:
        return self._ask(record_of)


def _ask(
    question: Callable[[ClusterSession], Awaitable[T]],
    name: str,
    manifest: Manifest | None,
    context: str | None,
    namespace: str | None,
) -> T:
    """Return the answer of a cluster; raises UsageError or ClusterError."""

    async def ask() -> T:
        async with open_session(
            name, manifest, context=context, namespace=namespace
        ) as session:
            return await question(session)

    return in_thread(lambda: asyncio.run(ask()))


def apply(
    manifest: Manifest, context: str | None, namespace: str | None
) -> ClusterPipelineRun:
    """Apply a manifest as `kubectl apply` does."""

    async def send(session: ClusterSession) -> ClusterPipelineRun:
        live = await session.api.get(paths.pipeline(session.key))
        await apply_manifest(session, manifest, live)
        chosen = session.context
        return ClusterPipelineRun(manifest.name, chosen.name, chosen.namespace)

    return _ask(send, manifest.name, manifest, context, namespace)


def plan(manifest: Manifest, context: str | None, namespace: str | None) -> PlanReport:
    """Return what applying a manifest would do, by a dry run of the API server."""
    return _ask(apply_forecast.plan, manifest.name, manifest, context, namespace)
