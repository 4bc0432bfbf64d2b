"""The deploy stage: serve the published model."""

from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from finetune_operator.api.stages.base import ConfigContext, GatedSpec, Serving, recipe_from
from finetune_operator.api.stages.push import Push
from finetune_trainer.contract import DeployConfig, DeployRecipe, ModelSource, StageConfig


class Deploy(GatedSpec, DeployRecipe):
    """Serves the published model: continuously on a cluster, and in a local run until it has answered one prompt."""

    name: ClassVar[str] = "deploy"
    condition: ClassVar[str] = "Deployed"
    needs: ClassVar[tuple[str, ...]] = (Push.name,)
    pool: ClassVar[str] = "inference"
    runs_server: ClassVar[bool] = True
    non_identity_fields: ClassVar[frozenset[str]] = frozenset({"replicas"})

    when: Literal["Always", "GatePassed"] = "GatePassed"
    """Always, or GatePassed: run only if the score passes evaluate.gate."""

    replicas: int = Field(default=1, ge=1, le=64)
    """Number of server replicas. A local run starts one."""

    @override
    def config(self, context: ConfigContext) -> DeployConfig:
        push = context.specs.get(Push.name)
        if not isinstance(push, Push):
            raise TypeError("deploy without push: validation rejects this spec")
        pushed = context.statuses[Push.name].result
        return DeployConfig(
            identity="",
            seed=context.seed,
            push=context.identities[Push.name],
            model=ModelSource(uri=push.target),
            digest=pushed.digest if pushed else None,
            recipe=recipe_from(self, DeployRecipe),
        )

    @override
    def serving(self, config: StageConfig) -> Serving | None:
        if not isinstance(config, DeployConfig):
            raise TypeError(f"config of another stage: {type(config).__name__}")
        recipe = config.recipe
        return Serving(recipe.engine, config.model.uri, config.digest, self.replicas, recipe.prompt, recipe.max_tokens)
