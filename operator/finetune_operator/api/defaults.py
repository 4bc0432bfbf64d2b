"""Defaults below the specs of pipelines: for the whole operator, and for a namespace."""

from typing import Annotated, ClassVar, Self

from pydantic import Field, StringConstraints

from finetune_operator.api.rules import Rule, WithRules
from finetune_operator.api.stages.base import ONE_DEFAULT_GPU
from finetune_operator.api.stages.pod import PodDefaults
from finetune_trainer.contract import ContractModel


class WorkspaceDefaults(ContractModel):
    """Defaults of the claims that the operator creates."""

    storage_class_name: (
        Annotated[str, StringConstraints(min_length=1, max_length=253)] | None
    ) = None
    """Storage class of claims whose pipeline names none."""


class Defaults(WithRules):
    """Values of the next attempt for the fields that its pipeline leaves out.

    It is part of neither hash of a stage, as the trainer's image is not: a change stops nothing and reruns nothing.
    """

    rules: ClassVar[tuple[Rule, ...]] = (ONE_DEFAULT_GPU,)

    pod_defaults: PodDefaults = Field(default_factory=PodDefaults)
    """Defaults of all pods, below spec.podDefaults."""
    workspace: WorkspaceDefaults = WorkspaceDefaults()
    """Defaults of workspaces."""

    # The nearer default wins: the namespace's over the operator's.
    def over(self, below: "Defaults") -> Self:
        """Return these defaults with others below them."""
        storage_class = (
            self.workspace.storage_class_name or below.workspace.storage_class_name
        )
        return self.model_copy(
            update={
                "pod_defaults": self.pod_defaults.over(below.pod_defaults),
                "workspace": WorkspaceDefaults(storage_class_name=storage_class),
            }
        )


NO_DEFAULTS = Defaults()
