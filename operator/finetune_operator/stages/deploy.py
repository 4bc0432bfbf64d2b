"""Serve the published model."""

from typing import ClassVar, Literal

from typing_extensions import override

from finetune_operator.stages.base import GatedSpec, Request
from finetune_operator.stages.parts import part
from finetune_trainer.contract import DeployConfig, DeployRecipe, ModelSource


class Deploy(GatedSpec, DeployRecipe):
    """Serves the published model and asks it once."""

    name: ClassVar[str] = "deploy"
    condition: ClassVar[str] = "Deployed"
    needs: ClassVar[tuple[str, ...]] = ("push",)
    pool: ClassVar[str] = "inference"

    when: Literal["Always", "GatePassed"] = "GatePassed"
    """GatePassed: only if the score is above evaluate.gate.threshold."""

    @override
    def config(self, request: Request) -> DeployConfig:
        if request.push_target is None:
            raise ValueError("deploy without push: the API refuses this")
        return DeployConfig(
            identity="",
            seed=request.seed,
            push=request.identities["push"],
            model=ModelSource(uri=request.push_target),
            recipe=part(self, DeployRecipe),
        )
