"""Serve the published model."""

from typing import ClassVar, Literal

from typing_extensions import override

from finetune_operator.stages.base import GatedSpec, Request
from finetune_operator.stages.parts import part
from finetune_operator.stages.push import Push
from finetune_trainer.contract import DeployConfig, DeployRecipe, ModelSource


class Deploy(GatedSpec, DeployRecipe):
    """Serves the published model and asks it once."""

    name: ClassVar[str] = "deploy"
    condition: ClassVar[str] = "Deployed"
    needs: ClassVar[tuple[str, ...]] = (Push.name,)
    pool: ClassVar[str] = "inference"

    when: Literal["Always", "GatePassed"] = "GatePassed"
    """GatePassed: only if the score is above evaluate.gate.threshold."""

    @override
    def config(self, request: Request) -> DeployConfig:
        push = request.specs.get(Push.name)
        if not isinstance(push, Push):
            raise TypeError("deploy without push: the API refuses this")
        return DeployConfig(
            identity="",
            seed=request.seed,
            push=request.identities[Push.name],
            model=ModelSource(uri=push.target),
            recipe=part(self, DeployRecipe),
        )
