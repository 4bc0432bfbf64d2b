"""What reconciling needs of a cluster, and all it may use."""

from collections.abc import Sequence
from typing import Protocol

from finetune_operator.api.status import PipelineStatus
from finetune_operator.core.events import Event
from finetune_operator.core.observation import Observation
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.core.plan import Action


class Cluster(Protocol):
    """A place where pipelines live and Jobs run. Every method may raise ClusterError."""

    async def read(self, key: Key) -> Pipeline | None:
        """Give the pipeline as it is now, or None where it is gone."""

    async def observe(self, pipeline: Pipeline) -> Observation:
        """Give what can be seen of its Jobs; one is Complete, Failed or missing only when no process of it is left."""

    async def write_status(self, pipeline: Pipeline, status: PipelineStatus) -> None:
        """Make the status durable, where it differs; raise Conflict where the pipeline has changed since the read."""

    async def apply(self, pipeline: Pipeline, actions: Sequence[Action]) -> None:
        """Do all of them; each may have been done already, by us or by a process that was killed half-way."""

    async def emit_events(self, pipeline: Pipeline, events: Sequence[Event]) -> None:
        """Tell people."""
