"""Turn the data set into packed rows of tokens."""

from typing import ClassVar

from typing_extensions import override

from finetune_operator.api.rules import Rule
from finetune_operator.api.stages.base import ARGS_ARE_A_COMMANDS, Request, StageSpec
from finetune_operator.api.stages.parts import part
from finetune_trainer.contract import PrepareConfig, PrepareRecipe


class Prepare(StageSpec, PrepareRecipe):
    """Turns the data set into packed rows of tokens, once."""

    name: ClassVar[str] = "prepare"
    condition: ClassVar[str] = "Prepared"
    pool: ClassVar[str] = "control"
    rules: ClassVar[tuple[Rule, ...]] = (ARGS_ARE_A_COMMANDS,)

    @override
    def config(self, request: Request) -> PrepareConfig:
        return PrepareConfig(
            identity="",
            seed=request.seed,
            model=request.model,
            dataset=request.dataset,
            recipe=part(self, PrepareRecipe),
        )
