"""The Cluster protocol: everything that reconciling may do to the outside world."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from finetune_operator.api.status import PipelineStatus
from finetune_operator.core.events import Event
from finetune_operator.core.observation import Blocker, Observation
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.core.planning.actions import Action


class Cluster(Protocol):
    """Stores pipelines and runs their Jobs. Every method may raise ClusterError."""

    async def read(self, key: Key) -> Pipeline | None:
        """Return the current pipeline, or None if it does not exist."""

    async def observe(self, pipeline: Pipeline) -> Observation:
        """Return the observed Jobs, servers and claim of the pipeline; change nothing.

        A Job counts as Complete, Failed or missing only when none of its processes is left.
        """

    async def write_status(
        self, pipeline: Pipeline, status: PipelineStatus
    ) -> Pipeline:
        """Store the status durably and return the pipeline with it; raise Conflict if it has changed since its read."""

    async def apply(
        self, pipeline: Pipeline, actions: Sequence[Action]
    ) -> Mapping[str, Blocker]:
        """Execute the actions in order, and return the refused ones: subject -> why.

        Each is idempotent: an operator that was killed may have executed it already. Nothing is created after an error.
        """

    async def emit_events(self, pipeline: Pipeline, events: Sequence[Event]) -> None:
        """Publish events for the user, on a cluster as Kubernetes Events."""
