"""What a user may choose, said once: the custom resource and the trainer's configs are built from these.

Each field's docstring becomes its description in `kubectl explain`.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

from finetune_trainer.contract.engines import ENGINES

URI_PATTERN = r"^((hf|file)://\S+|pvc://[a-z0-9][a-z0-9.-]*(/\S*)?|[A-Za-z0-9_.][^\s:]*)$"
TARGET_PATTERN = r"^(file://\S+|pvc://[a-z0-9][a-z0-9.-]*(/\S*)?|[A-Za-z0-9_.][^\s:]*)$"

Uri = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=URI_PATTERN)]
Revision = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^\S+$")]
TaskName = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
ModuleName = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.*-]+$")]


class ContractModel(BaseModel):
    """camelCase outside, snake_case inside; nothing unknown is accepted and nothing is changed afterwards."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )


class ModelSource(ContractModel):
    """The base model: a folder in Hugging Face format."""

    uri: Uri
    """hf://ORG/NAME, pvc://CLAIM/PATH, or on a laptop file:///PATH or a path beside the manifest."""

    revision: Revision | None = None
    """A commit or tag of the hub's repository. For other sources any word; changing it says the content has changed."""


class DatasetSource(ContractModel):
    """The training records: one JSON Lines, JSON, CSV or Parquet file."""

    uri: Uri
    """hf://ORG/NAME/PATH, pvc://CLAIM/PATH, or on a laptop file:///PATH or a path beside the manifest."""

    revision: Revision | None = None
    """A commit or tag of the hub's repository. For other sources any word; changing it says the content has changed."""

    format: Literal["auto", "jsonl", "json", "csv", "parquet"] = "auto"
    """How the file is read; auto goes by the file's ending."""

    validation_fraction: float = Field(default=0.05, ge=0, le=0.5)
    """The share of records kept apart to measure the validation loss; chosen by seed, never by chance."""

    max_invalid_fraction: float = Field(default=0.0, ge=0, le=1)
    """The share of records that may be unusable before the stage fails (exit code 65)."""


class PrepareRecipe(ContractModel):
    """How records become fixed-length rows of tokens."""

    context_length: int = Field(default=1024, ge=16, le=131072)
    """Tokens in one packed row, and the longest record that fits whole."""

    too_long: Literal["truncate", "drop"] = "truncate"
    """What happens to a record longer than contextLength; how many is in the stage's result."""


class Lora(ContractModel):
    """The adapter (Hu et al. 2021, arXiv:2106.09685)."""

    rank: int = Field(default=16, ge=1, le=1024)
    """Rank of the two factors that each adapted layer gains."""

    alpha: float = Field(default=32, gt=0, le=8192)
    """The update is scaled by alpha/rank; with variant rslora by alpha/sqrt(rank)."""

    dropout: float = Field(default=0.05, ge=0, lt=1)
    """Dropout before the first factor, in training only."""

    target_modules: tuple[ModuleName, ...] = Field(default=("all-linear",), min_length=1, max_length=64)
    """Names of the layers to adapt; all-linear means every linear layer but the output head."""

    variant: Literal["lora", "rslora", "dora"] = "lora"
    """rslora scales by sqrt(rank) (arXiv:2312.03732); dora also learns magnitudes (arXiv:2402.09353)."""


class Optimizer(ContractModel):
    """AdamW (arXiv:1711.05101) and its schedule."""

    learning_rate: float = Field(default=2e-4, gt=0, le=1)
    """The rate after warm-up."""

    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the rate falls from the end of warm-up to the last step; cosine and linear end at zero."""

    warmup_fraction: float = Field(default=0.03, ge=0, lt=1)
    """The share of all steps over which the rate rises from zero."""

    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """Decoupled weight decay."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""

    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""

    max_grad_norm: float = Field(default=1.0, ge=0, le=1000)
    """Gradients are scaled down to this norm; 0 leaves them as they are."""


class Checkpoint(ContractModel):
    """When and how many checkpoints are kept. Changes how a run survives, never its result."""

    every_steps: int = Field(default=500, ge=1, le=1_000_000)
    """Optimizer steps between two checkpoints."""

    every_seconds: int | None = Field(default=None, ge=1, le=86400)
    """Also save when this many seconds have passed since the last checkpoint."""

    keep: int = Field(default=2, ge=2, le=100)
    """How many of the newest to keep, besides the best one. Two at least, so that a broken one has a predecessor."""


class EarlyStopping(ContractModel):
    """Ends training when the validation loss has stopped falling."""

    patience: int = Field(default=3, ge=1, le=1000)
    """Validations in a row without an improvement before training ends."""

    min_delta: float = Field(default=0.0, ge=0, le=100)
    """How much lower the loss must be to count as an improvement."""


class TrainRecipe(ContractModel):
    """What determines the adapter's bytes."""

    epochs: float | None = Field(default=None, gt=0, le=10000)
    """Passes over the training rows; 1 where maxSteps is not given either."""

    max_steps: int | None = Field(default=None, ge=1, le=100_000_000)
    """Optimizer steps in all, in place of epochs."""

    batch_size: int = Field(default=1, ge=1, le=4096)
    """Packed rows in one forward pass."""

    gradient_accumulation: int = Field(default=1, ge=1, le=4096)
    """Forward passes in one optimizer step."""

    precision: Literal["bf16", "fp32"] = "bf16"
    """Numbers of the frozen base model and of the forward pass; the adapter itself is always fp32."""

    lora: Lora = Lora()
    """The adapter."""

    optimizer: Optimizer = Optimizer()
    """The optimizer and its schedule."""

    validate_every_steps: int | None = Field(default=None, ge=1, le=1_000_000)
    """Optimizer steps between two validations; absent: once, at the end. The adapter with the lowest loss wins."""

    early_stopping: EarlyStopping | None = None
    """Absent: train to the last step."""

    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, about a third slower."""

    compile: bool = False
    """Compile the model with torch.compile: slower to start, faster to run on a GPU."""

    def effective_epochs(self) -> float | None:
        """Give the epochs to train for, or None where maxSteps says how long."""
        return self.epochs if self.epochs is not None or self.max_steps else 1.0


class Task(ContractModel):
    """One lm-eval task."""

    file: Uri | None = None
    """A task file (YAML) in place of one of lm-eval's own; paths inside it are looked up beside it."""

    few_shot: int | None = Field(default=None, ge=0, le=100)
    """Solved examples put before each question; absent: as many as the task itself asks for."""

    limit: int | None = Field(default=None, ge=1, le=10_000_000)
    """Only the first so many questions; a score from fewer has a larger standard error."""


class Gate(ContractModel):
    """What the score must be before anything is deployed."""

    task: TaskName
    """One of the names under tasks."""

    metric: Annotated[str, StringConstraints(min_length=1, max_length=64)] = "acc"
    """The metric as lm-eval names it, with or without its filter: acc, or acc,none."""

    threshold: float = Field(allow_inf_nan=False)
    """The gate opens when the score is greater than this, not when it is equal."""

    standard_errors: float = Field(default=0.0, ge=0, le=10)
    """How many standard errors the score must be above the threshold; 1.645 is 95 % sure that it is not luck."""


class EvaluateRecipe(ContractModel):
    """What is measured."""

    tasks: dict[TaskName, Task] = Field(min_length=1, max_length=16)
    """lm-eval tasks by name."""

    model: Literal["adapter", "merged"] = "adapter"
    """Measure the base model with the adapter beside it, or the merged model that is going to be pushed."""

    batch_size: int = Field(default=8, ge=1, le=4096)
    """Requests in one forward pass."""


class PushRecipe(ContractModel):
    """Where the merged model goes."""

    target: Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=TARGET_PATTERN)]
    """pvc://CLAIM/PATH, or on a laptop file:///PATH or a path beside the manifest."""

    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Numbers of the published weights. The merge itself is done in fp32 and cast once."""


def _known_engine(value: str) -> str:
    if value not in ENGINES:
        raise ValueError(f"must be one of {', '.join(sorted(ENGINES))}")
    return value


EngineName = Annotated[str, AfterValidator(_known_engine), Field(json_schema_extra={"enum": sorted(ENGINES)})]


class DeployRecipe(ContractModel):
    """How the model is served."""

    engine: EngineName = "transformers"
    """The server, OpenAI-compatible: transformers is `transformers serve`, for processors too; vllm is for GPUs."""

    prompt: Annotated[str, StringConstraints(min_length=1, max_length=4096)] = "Hello"
    """Sent once when the server is ready; the answer is kept in the status."""

    max_tokens: int = Field(default=32, ge=1, le=4096)
    """Tokens of that answer at most."""
