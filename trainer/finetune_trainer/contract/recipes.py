"""Recipes: the settings that a user may choose, defined once for the custom resource and for the trainer's configs.

Each field's docstring is its description in `kubectl explain`. A changed default changes identities, and a changed
bound changes the CRD.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from finetune_trainer.contract.chat_template import ChatTemplateRecipe
from finetune_trainer.contract.engines import ENGINES
from finetune_trainer.contract.models import ContractModel, ListMap, one_of
from finetune_trainer.contract.tasks import Task
from finetune_trainer.contract.uris import ModelUri, TargetUri

Revision = Annotated[
    str, StringConstraints(min_length=1, max_length=256, pattern=r"^\S+$")
]
Weights = Literal["Merged", "Adapter"]
Dtype = Literal["BF16", "FP16", "FP32"]
Objective = Literal["SFT", "DPO"]
TooLong = Literal["Truncate", "Drop", "Split"]
Unrendered = Literal["Refuse", "Warn"]
ModuleName = Annotated[
    str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.*-]+$")
]


class ModelSource(ContractModel):
    """The base model: a folder in Hugging Face format."""

    uri: ModelUri
    """hf://ORG/NAME, s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH, oci://HOST/REPOSITORY[:TAG] or
    pvc://CLAIM/PATH; in a local run also file:///PATH or a path relative to the manifest."""

    revision: Revision | None = None
    """Commit or tag of the hub repository. For other sources any text; change it when the content has changed."""


class PrepareRecipe(ChatTemplateRecipe):
    """How records become fixed-length rows of tokens."""

    context_length: int = Field(default=1024, ge=16, le=131072)
    """Tokens per packed row, and the length above which a record is too long."""

    too_long: TooLong | None = None
    """What happens to a record longer than contextLength: Truncate, Drop, or Split into pieces, each a document of its
    own. Only plain text can be split: with Split, every other long record is invalid. Absent: Split for plain text,
    Truncate for all other records. The stage's result counts all of them. With train.objective DPO a record is a pair
    of completions, and contextLength limits each completion with its prompt."""

    unrendered: Unrendered = "Refuse"
    """What happens to a record with a text that its rows would not hold, because the chat template or a template of
    columns leaves it out, or the tokenizer has no token for it; or with a message that no turn of the assistant
    follows. Refuse: the record is invalid. Warn: it is used without the text, and the stage's result counts it."""

    packing: bool = True
    """Whether several records share a row. With false, every row has a single record, which some architectures need.
    With train.objective DPO every row has a single completion anyway, and false is refused."""

    max_invalid_fraction: float = Field(default=0.0, ge=0, le=1)
    """Fraction of the records that may be invalid. If more are invalid, the stage fails with exit code 65."""


# A block beside `method` and no union of methods: in a union, the schema of a CRD may have no descriptions (ADR 29).
class Lora(ContractModel):
    """The adapter (Hu et al. 2021, arXiv:2106.09685)."""

    rank: int = Field(default=16, ge=1, le=1024)
    """Rank of the two low-rank factors added to each adapted layer."""

    alpha: float = Field(default=32, gt=0, le=8192)
    """The update is scaled by alpha/rank; with variant RsLoRA by alpha/sqrt(rank)."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability before the first factor; applied in training only. Experts of a MoE model need 0."""

    target_modules: tuple[ModuleName, ...] = Field(
        default=("all-linear",), min_length=1, max_length=64
    )
    """Names of the layers to adapt; all-linear selects every linear layer except output head and routers. If the model
    holds all experts in one tensor, only their names select them."""

    modules_to_save: tuple[ModuleName, ...] = Field(default=(), max_length=16)
    """Names of layers to train whole, such as embed_tokens and lm_head; they are saved with the adapter."""

    variant: Literal["LoRA", "RsLoRA", "DoRA"] = "LoRA"
    """RsLoRA scales by alpha/sqrt(rank) (arXiv:2312.03732); DoRA also learns magnitudes (arXiv:2402.09353)."""


class AdapterSource(ModelSource):
    """A LoRA adapter in PEFT's format: adapter_model.safetensors and adapter_config.json."""


class Optimizer(ContractModel):
    """The optimizer and its learning rate schedule."""

    name: Literal["AdamW", "AdamW8Bit"] = "AdamW"
    """AdamW (arXiv:1711.05101), or AdamW with moments of 8 bits, which take a quarter of the memory
    (arXiv:2110.02861)."""

    learning_rate: float = Field(default=2e-4, gt=0, le=1)
    """Learning rate after warm-up."""

    scheduler: Literal["Cosine", "Linear", "Constant", "WarmupStableDecay"] = "Cosine"
    """How the learning rate decays from the end of warm-up to the last step. WarmupStableDecay is constant until
    decayFraction of the steps is left, and linear from there (arXiv:2404.06395)."""

    warmup_fraction: float = Field(default=0.03, ge=0, lt=1)
    """Fraction of all steps in which the learning rate rises from zero."""

    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """Fraction of all steps in which the learning rate falls with WarmupStableDecay; the warm-up comes first. Other
    schedulers have no such field."""

    min_learning_rate_fraction: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end of the decay, as a fraction of learningRate."""

    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """Coefficient of the decoupled weight decay."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of the first moment estimate."""

    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay rate of the second moment estimate."""

    max_grad_norm: float = Field(default=1.0, ge=0, le=1000)
    """Gradients with a larger norm are scaled down to this norm; 0 disables clipping."""


class Checkpoint(ContractModel):
    """When checkpoints are saved and how many are kept. Does not change the result."""

    every_steps: int = Field(default=500, ge=1, le=1_000_000)
    """Optimizer steps between two checkpoints."""

    # By Young and Daly, sqrt(2 · cost of a checkpoint · mean time between kills) is best: 1 s and 4.5 h give 180 s.
    every_seconds: int = Field(default=180, ge=1, le=86400)
    """Also save a checkpoint when this many seconds have passed since the last checkpoint: a kill costs little more."""

    keep: int = Field(default=2, ge=2, le=100)
    """Number of latest checkpoints to keep, besides the best checkpoint. At least 2, as a fallback for a corrupt
    checkpoint."""


class Samples(ContractModel):
    """Texts that the model generates before training and at each validation, greedily. They change no result."""

    prompts: tuple[
        Annotated[str, StringConstraints(min_length=1, max_length=4096)], ...
    ] = Field(min_length=1, max_length=8)
    """Prompts. If the training records are conversations, each prompt is the first message of a conversation."""

    max_new_tokens: int = Field(default=64, ge=1, le=512)
    """Maximum number of tokens of each text."""


class Dpo(ContractModel):
    """The loss of the objective DPO (Rafailov et al. 2023, arXiv:2305.18290)."""

    beta: float = Field(default=0.1, gt=0, le=100)
    """How strongly the loss holds the model to the reference, which is the model before training. A larger value holds
    it closer."""

    label_smoothing: float = Field(default=0.0, ge=0, le=0.49)
    """Assumed probability that the two completions of a pair are in the wrong order (conservative DPO)."""


class EarlyStopping(ContractModel):
    """Ends training when the validation loss no longer improves."""

    patience: int = Field(default=3, ge=1, le=1000)
    """Consecutive validations without an improvement after which training ends."""

    min_delta: float = Field(default=0.0, ge=0, le=100)
    """Minimum decrease of the loss that counts as an improvement."""


class TrainRecipe(ContractModel):
    """All settings that determine the trained weights."""

    objective: Objective = "SFT"
    """Loss to minimise. SFT: the cross-entropy of the completions (supervised fine-tuning). DPO: the loss of Direct
    Preference Optimization on pairs of a chosen and a rejected completion, set under dpo."""

    dpo: Dpo | None = None
    """The loss of the objective DPO. Absent: the defaults of its fields."""

    method: Literal["LoRA", "QLoRA", "Full"] = "LoRA"
    """Weights to train. LoRA: an adapter beside the frozen base model, set under lora. QLoRA: the same adapter, with
    the base model in 4 bits (NF4, arXiv:2305.14314). Full: all weights, at 16 bytes each."""

    lora: Lora | None = None
    """The adapter of the methods LoRA and QLoRA. Absent: the defaults of its fields, or with startFrom the settings of
    the adapter that it names."""

    start_from: AdapterSource | None = None
    """An adapter whose weights training starts from, for the methods LoRA and QLoRA. Absent: a new adapter, which
    changes nothing yet."""

    epochs: float | None = Field(default=None, gt=0, le=10000)
    """Passes over the training rows or pairs; 1 if maxSteps is absent too."""

    max_steps: int | None = Field(default=None, ge=1, le=100_000_000)
    """Total number of optimizer steps, instead of epochs."""

    micro_batch_size: int = Field(default=1, ge=1, le=4096)
    """Packed rows per forward pass of a process, or pairs with objective DPO. A step has microBatchSize x
    gradientAccumulationSteps x processes rows or pairs."""

    gradient_accumulation_steps: int = Field(default=1, ge=1, le=4096)
    """Forward passes of each process per optimizer step."""

    # Nodes and processes change the result: they draw other random numbers, and sums are added in another order.
    nodes: int = Field(default=1, ge=1, le=64)
    """Pods that train together, each with the resources of pod: on Kubernetes an Indexed Job, in a local run processes
    of this machine. More nodes make a step larger, so this changes the result."""

    processes_per_node: int | None = Field(default=None, ge=1, le=64)
    """Processes in each pod that train together. Absent: one for each accelerator of the pod, at least 1."""

    dtype: Literal["BF16", "FP32"] = "BF16"
    """Data type of the frozen base model and of the forward pass. The weights that are trained are always FP32."""

    neftune_noise_alpha: float | None = Field(default=None, gt=0, le=100)
    """Size of the uniform noise on the embeddings of training (NEFTune, arXiv:2310.05914). Absent: no noise."""

    optimizer: Optimizer = Optimizer()
    """The optimizer and its learning rate schedule."""

    eval_steps: int | None = Field(default=None, ge=1, le=1_000_000)
    """Optimizer steps between two validations; absent: only at the end. The weights with the lowest loss are kept."""

    early_stopping: EarlyStopping | None = None
    """When to end training early; absent: train to the last step."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: uses less memory and is slower. It changes no result."""

    compile: bool = False
    """Compile the layers with torch.compile: starts slower, to run faster on a GPU. Results differ by rounding in BF16,
    and with dropout on a CPU by the elements dropped. Not for lora.variant DoRA. The compiler is in the image
    finetune-trainer, not in finetune-trainer-cpu."""

    parallelism: Literal["DDP", "FSDP"] = "DDP"
    """How several processes hold the model. DDP: each holds all of it. FSDP: its weights, their gradients and the
    optimizer state are sharded over all processes, which gather a layer when it computes."""

    @property
    def processes(self) -> int:
        """The world size: the number of processes of all nodes that train together."""
        return self.nodes * (self.processes_per_node or 1)

    @property
    def adapter(self) -> Lora:
        """The settings of the adapter; the defaults if the block is absent."""
        return self.lora or Lora()

    @property
    def preference(self) -> Dpo:
        """The settings of DPO; the defaults if the block is absent."""
        return self.dpo or Dpo()

    def effective_epochs(self) -> float | None:
        """Return the epochs to train for, or None if maxSteps limits the training."""
        if self.epochs is None and not self.max_steps:
            return 1.0
        return self.epochs


class EvaluateRecipe(ContractModel):
    """The tasks to evaluate, and the model to evaluate them on."""

    # A map by name, as a task's scores are stored by its name.
    tasks: Annotated[tuple[Task, ...], ListMap("name")] = Field(
        min_length=1, max_length=16
    )
    """lm-eval tasks, and held_out for the validation records of these data."""

    weights: Weights | None = None
    """Adapter: evaluate the base model with the adapter attached. Merged: evaluate the merged model as it is pushed.
    Absent: Merged if the pipeline pushes a merged model or trains no adapter, else Adapter."""

    compare_with_base: bool = False
    """Also evaluate the base model on the same questions, after the other model. The scores then have the base's value
    and the standard error of the paired difference. Takes twice the time."""

    apply_chat_template: bool | None = None
    """Write each question as a conversation, with the chat template of training. Absent: true if the training records
    are conversations."""

    fewshot_as_multiturn: bool | None = None
    """Write each few-shot example as a turn of the user and a turn of the assistant, instead of all examples in one
    turn. Absent: the same as applyChatTemplate."""

    system_instruction: (
        Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None
    ) = None
    """System message before every question. Without a chat template, it is text directly before the question: end it
    with a line break, because lm-eval adds none."""

    batch_size: int | None = Field(default=None, ge=1, le=4096)
    """Requests per forward pass. Absent: as many as fit, at most 64 on a GPU and 32 on a CPU. The last digits of a
    score may depend on it, so set it to compare scores of different machines."""

    @property
    def lm_eval_tasks(self) -> tuple[Task, ...]:
        """The tasks of lm-eval."""
        return tuple(task for task in self.tasks if not task.is_held_out)

    @property
    def has_held_out(self) -> bool:
        """Whether the validation records are measured."""
        return any(task.is_held_out for task in self.tasks)


class PushTarget(ContractModel):
    """A target to publish to."""

    uri: TargetUri
    """hf://ORG/NAME, s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH, oci://HOST/REPOSITORY[:TAG] or
    pvc://CLAIM/PATH; in a local run also file:///PATH or a path relative to the manifest."""

    format: Weights = "Merged"
    """Merged: the base model with the adapter merged into it, or with all weights trained. Adapter: the adapter alone,
    in PEFT's format."""

    private: bool = True
    """Whether a repository that the push creates on a hub is private. An existing repository stays as it is."""


class PushRecipe(ContractModel):
    """The targets and the data type of the published model."""

    # A map by URI, so that server-side apply merges the targets of several field managers.
    targets: Annotated[tuple[PushTarget, ...], ListMap("uri")] = Field(
        min_length=1, max_length=4
    )
    """Targets to publish to. The stage is done when all targets have the model."""

    dtype: Dtype = "BF16"
    """Data type of the merged weights. The merge is computed in FP32 and cast once."""

    @property
    def merged_dtype(self) -> Dtype | None:
        """The data type of the merged weights; None if only an adapter is published."""
        return self.dtype if self.has("Merged") else None

    def has(self, form: Weights) -> bool:
        """Return whether a target has this format."""
        return any(target.format == form for target in self.targets)


class SmokeTest(ContractModel):
    """The request that a server must answer before it counts as deployed."""

    prompt: Annotated[str, StringConstraints(min_length=1, max_length=4096)] = "Hello"
    """Prompt sent once when the server is ready; the status contains the answer. If the training records are
    conversations, the prompt is the first message of a conversation. An answer without text fails the stage."""

    max_tokens: int = Field(default=32, ge=1, le=4096)
    """Maximum number of tokens in the answer."""

    # No regular expression: the operator must not run patterns that take exponential time.
    expect: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = (
        None
    )
    """Text that the answer must contain, in the same upper and lower case. Absent: any text passes."""


# An enum in the schema, so that the API server refuses an unknown engine.
EngineName = Annotated[
    str,
    AfterValidator(one_of(ENGINES)),
    Field(json_schema_extra={"enum": sorted(ENGINES)}),
]


class DeployRecipe(ContractModel):
    """How the model is served and checked."""

    engine: EngineName = "Transformers"
    """The OpenAI-compatible server: Transformers is `transformers serve` and runs on CPUs too; VLLM needs a GPU."""

    smoke_test: SmokeTest = SmokeTest()
    """The request that the server must answer."""
