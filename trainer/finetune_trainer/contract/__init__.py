"""What the operator and a stage's process agree on; needs pydantic only.

The operator imports this package and nothing else of the trainer. A container that is not ours
keeps the same agreement: `docs/stage-contract.md` says it in words.
"""

from finetune_trainer.contract.configs import (
    AnyConfig,
    DeployConfig,
    EvaluateConfig,
    Lineage,
    PrepareConfig,
    PushConfig,
    StageConfig,
    TrainConfig,
    parse_config,
)
from finetune_trainer.contract.environment import Environment
from finetune_trainer.contract.recipes import (
    Checkpoint,
    Contract,
    DatasetSource,
    DeployRecipe,
    EarlyStopping,
    EvaluateRecipe,
    Gate,
    Lora,
    ModelSource,
    Optimizer,
    PrepareRecipe,
    PushRecipe,
    Task,
    TrainRecipe,
)
from finetune_trainer.contract.results import (
    AnyResult,
    DeployResult,
    EvaluateResult,
    Failure,
    Interruption,
    PrepareResult,
    Progress,
    PushResult,
    Score,
    StageResult,
    TerminationMessage,
    TrainResult,
)
from finetune_trainer.exit_codes import ExitCode

__all__ = [
    "AnyConfig",
    "AnyResult",
    "Checkpoint",
    "Contract",
    "DatasetSource",
    "DeployConfig",
    "DeployRecipe",
    "DeployResult",
    "EarlyStopping",
    "Environment",
    "EvaluateConfig",
    "EvaluateRecipe",
    "EvaluateResult",
    "ExitCode",
    "Failure",
    "Gate",
    "Interruption",
    "Lineage",
    "Lora",
    "ModelSource",
    "Optimizer",
    "PrepareConfig",
    "PrepareRecipe",
    "PrepareResult",
    "Progress",
    "PushConfig",
    "PushRecipe",
    "PushResult",
    "Score",
    "StageConfig",
    "StageResult",
    "Task",
    "TerminationMessage",
    "TrainConfig",
    "TrainRecipe",
    "TrainResult",
    "parse_config",
]
