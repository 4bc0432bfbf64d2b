"""Turn the data set into packed rows of tokens."""

from typing import ClassVar

from typing_extensions import override

from finetune_operator.stages.base import Request, StageSpec
from finetune_operator.stages.parts import part
from finetune_trainer.contract import PrepareConfig, PrepareRecipe


class Prepare(StageSpec, PrepareRecipe):
    """Turns the data set into packed rows of tokens, once."""

    name: ClassVar[str] = "prepare"
    condition: ClassVar[str] = "Prepared"
    pool: ClassVar[str] = "control"

    @override
    def config(self, request: Request) -> PrepareConfig:
        return PrepareConfig(
            identity="",
            seed=request.seed,
            model=request.model,
            dataset=request.dataset,
            recipe=part(self, PrepareRecipe),
        )
