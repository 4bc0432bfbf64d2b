"""The deploy stage: serve the published model."""

from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from finetune_operator.api.stages.base import (
    ConfigContext,
    GatedSpec,
    Serving,
    recipe_from,
)
from finetune_operator.api.stages.push import Push
from finetune_trainer.contract import (
    AnyResult,
    DeployConfig,
    DeployRecipe,
    ModelSource,
    PrepareResult,
    PushResult,
    StageConfig,
)


class Deploy(GatedSpec, DeployRecipe):
    """Serves the published model: continuously on a cluster, and in a local run until it has answered one prompt."""

    name: ClassVar[str] = "deploy"
    condition: ClassVar[str] = "Deployed"
    needs: ClassVar[tuple[str, ...]] = (Push.name,)
    pool: ClassVar[str] = "inference"
    runs_server: ClassVar[bool] = True
    non_identity_fields: ClassVar[frozenset[str]] = frozenset({"replicas"})
    in_place_fields: ClassVar[frozenset[str]] = frozenset({"replicas"})

    when: Literal["Always", "GatesPassed"] = "GatesPassed"
    """Always, or GatesPassed: run only if the scores pass all of evaluate.gates."""

    replicas: int = Field(default=1, ge=1, le=64)
    """Number of server replicas, changed in place. `kubectl scale`, a HorizontalPodAutoscaler and KEDA set it by the
    pipeline's subresource scale. A local run starts one."""

    @override
    def config(self, context: ConfigContext) -> DeployConfig:
        push = context.specs.get(Push.name)
        if not isinstance(push, Push) or not push.has("Merged"):
            # The check is for the type checker: no such spec gets here.
            raise TypeError(
                "deploy without a merged model: validation rejects this spec"
            )
        target = next(target for target in push.targets if target.format == "Merged")
        result = context.statuses[Push.name].result
        pushed = result.first("Merged") if isinstance(result, PushResult) else None
        prepared = context.statuses["prepare"].result
        return DeployConfig(
            identity="",
            seed=context.seed,
            push=context.identities[Push.name],
            model=ModelSource(uri=target.uri),
            location=pushed.uri if pushed else None,
            digest=pushed.digest if pushed else None,
            conversations=isinstance(prepared, PrepareResult)
            and prepared.conversations,
            recipe=recipe_from(self, DeployRecipe),
        )

    @override
    def adoption_problem(self, result: AnyResult) -> str | None:
        if not isinstance(result, PushResult) or result.first("Merged"):
            return None
        # Without it, a model of unknown content would be served from the target of format Merged.
        uri = result.published[0].uri
        return f"{uri} is an adapter, and deploy serves a merged model: adopt the target of format Merged"

    @override
    def serving(self, config: StageConfig) -> Serving | None:
        if not isinstance(config, DeployConfig):
            raise TypeError(f"config of another stage: {type(config).__name__}")
        recipe = config.recipe
        return Serving(
            engine=recipe.engine,
            model=config.location or config.model.uri,
            digest=config.digest,
            replicas=self.replicas,
            prompt=recipe.smoke_test.prompt,
            max_tokens=recipe.smoke_test.max_tokens,
            conversations=config.conversations,
            expect=recipe.smoke_test.expect,
        )
