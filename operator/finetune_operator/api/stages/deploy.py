"""Serve the published model."""

from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from finetune_operator.api.stages.base import GatedSpec, Request, Serving
from finetune_operator.api.stages.parts import part
from finetune_operator.api.stages.push import Push
from finetune_trainer.contract import DeployConfig, DeployRecipe, ModelSource, StageConfig


class Deploy(GatedSpec, DeployRecipe):
    """Serves the published model: on a cluster from then on, on a laptop until it has answered once."""

    name: ClassVar[str] = "deploy"
    condition: ClassVar[str] = "Deployed"
    needs: ClassVar[tuple[str, ...]] = (Push.name,)
    pool: ClassVar[str] = "inference"
    lasting: ClassVar[bool] = True
    execution_fields: ClassVar[frozenset[str]] = frozenset({"replicas"})

    when: Literal["Always", "GatePassed"] = "GatePassed"
    """GatePassed: only if the score is above evaluate.gate.threshold."""

    replicas: int = Field(default=1, ge=1, le=64)
    """Servers that share the requests. On a laptop there is one."""

    @override
    def config(self, request: Request) -> DeployConfig:
        push = request.specs.get(Push.name)
        if not isinstance(push, Push):
            raise TypeError("deploy without push: the API refuses this")
        pushed = request.told[Push.name].result
        return DeployConfig(
            identity="",
            seed=request.seed,
            push=request.identities[Push.name],
            model=ModelSource(uri=push.target),
            digest=pushed.digest if pushed else None,
            recipe=part(self, DeployRecipe),
        )

    @override
    def serving(self, config: StageConfig) -> Serving | None:
        if not isinstance(config, DeployConfig):
            raise TypeError(f"the config of another stage: {type(config).__name__}")
        recipe = config.recipe
        return Serving(recipe.engine, config.model.uri, config.digest, self.replicas, recipe.prompt, recipe.max_tokens)
