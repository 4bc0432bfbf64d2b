"""The train stage: train an adapter, or all weights."""

from datetime import timedelta
from typing import ClassVar

from typing_extensions import override

from finetune_operator.api.placement import TrainPlacement
from finetune_operator.api.rules import Rule
from finetune_operator.api.stages.base import (
    ARGS_NEED_COMMAND,
    HAS_COMMAND,
    ConfigContext,
    StageSpec,
    recipe_from,
)
from finetune_operator.api.stages.ignored_fields import IGNORED_IN_TRAIN
from finetune_operator.api.stages.pod import IS_ACCELERATOR, is_accelerator
from finetune_trainer.contract import (
    Checkpoint,
    Dpo,
    Lora,
    Samples,
    TrainConfig,
    TrainRecipe,
)

LIMITS = "self.pod.resources.limits"

ONE_PROCESS_PER_GPU = Rule(
    field="processesPerNode",
    message="is not the number of accelerators in pod.resources.limits: remove it, and each accelerator gets a process",
    cel=f"!has(self.processesPerNode) || !has(self.pod) || !has(self.pod.resources) || !has({LIMITS})"
    f" || ({HAS_COMMAND}) || {LIMITS}.all(name, !({IS_ACCELERATOR})"
    f" || string({LIMITS}[name]) in ['0', string(self.processesPerNode)])",
    is_valid=lambda data: (
        "processesPerNode" not in data
        or bool(data["pod"].get("command"))
        or all(
            str(count) in {"0", str(data["processesPerNode"])}
            for name, count in data["pod"]
            .get("resources", {})
            .get("limits", {})
            .items()
            if is_accelerator(name)
        )
    ),
)


class Train(StageSpec, TrainRecipe):
    """Trains an adapter, or all weights. Resumes from a checkpoint after an interruption."""

    name: ClassVar[str] = "train"
    condition: ClassVar[str] = "Trained"
    needs: ClassVar[tuple[str, ...]] = ("prepare",)
    pool: ClassVar[str] = "training"
    non_identity_fields: ClassVar[frozenset[str]] = frozenset({"checkpoint", "samples"})
    rules: ClassVar[tuple[Rule, ...]] = (
        ARGS_NEED_COMMAND,
        ONE_PROCESS_PER_GPU,
        *IGNORED_IN_TRAIN,
        Rule(
            field="maxSteps",
            message="set epochs or maxSteps, not both",
            reason="FieldValueForbidden",
            cel="!(has(self.epochs) && has(self.maxSteps))",
            is_valid=lambda data: not ("epochs" in data and "maxSteps" in data),
        ),
        Rule(
            field="dpo",
            message="is the loss of objective DPO: set objective to DPO, or remove dpo",
            reason="FieldValueForbidden",
            cel="!has(self.dpo) || (has(self.objective) && self.objective == 'DPO')",
            is_valid=lambda data: "dpo" not in data or data["objective"] == "DPO",
        ),
        Rule(
            field="lora",
            message="method Full trains no adapter: remove lora, or set method to LoRA or QLoRA",
            reason="FieldValueForbidden",
            cel="!has(self.lora) || !has(self.method) || self.method != 'Full'",
            is_valid=lambda data: "lora" not in data or data["method"] != "Full",
        ),
        Rule(
            field="parallelism",
            message="FSDP shards no weights of 4 bits and no moments of 8: set method to LoRA or Full and"
            " optimizer.name to AdamW, or parallelism to DDP",
            cel="!has(self.parallelism) || self.parallelism == 'DDP' || (!(has(self.method) && self.method == 'QLoRA')"
            " && !(has(self.optimizer) && has(self.optimizer.name) && self.optimizer.name == 'AdamW8Bit'))",
            is_valid=lambda data: (
                data["parallelism"] == "DDP"
                or (
                    data["method"] != "QLoRA"
                    and data["optimizer"]["name"] != "AdamW8Bit"
                )
            ),
        ),
        Rule(
            field="compile",
            message="DoRA cannot be compiled: set compile to false, or lora.variant to RsLoRA",
            cel="!has(self.compile) || !self.compile || !has(self.lora) || !has(self.lora.variant)"
            " || self.lora.variant != 'DoRA'",
            is_valid=lambda data: (
                not data["compile"] or data.get("lora", {}).get("variant") != "DoRA"
            ),
        ),
        Rule(
            field="earlyStopping",
            message="needs repeated validation: set evalSteps",
            cel="!has(self.earlyStopping) || has(self.evalSteps)",
            is_valid=lambda data: "earlyStopping" not in data or "evalSteps" in data,
        ),
        Rule(
            field="startFrom",
            message="method Full trains no adapter: remove startFrom, or set method to LoRA or QLoRA",
            reason="FieldValueForbidden",
            cel="!has(self.startFrom) || !has(self.method) || self.method != 'Full'",
            is_valid=lambda data: "startFrom" not in data or data["method"] != "Full",
        ),
    )

    # Auto by default: train resumes from a checkpoint after an interruption.
    placement: TrainPlacement = TrainPlacement()
    """Capacity on which the stage's pod runs."""

    checkpoint: Checkpoint = Checkpoint()
    """When checkpoints are saved, and how many are kept."""

    samples: Samples | None = None
    """Texts to generate before training and at each validation. Absent: none."""

    @override
    def source_uris(self) -> tuple[str, ...]:
        if self.start_from is None:
            return ()
        return (self.start_from.uri,)

    @property
    @override
    def pods(self) -> int:
        return self.nodes

    @property
    @override
    def processes(self) -> int:
        return self.nodes * (self._processes_per_node or 1)

    @property
    def _processes_per_node(self) -> int | None:
        """The processes of each pod, or None for a single process."""
        # A command of the user starts its own processes.
        per_accelerator = 1 if self.pod.command else self.pod.resources.accelerators
        count = self.processes_per_node or per_accelerator
        # Not 1: a single accelerator, processesPerNode: 1 and an absent field must have the same identity.
        return count if count > 1 else None

    @property
    @override
    def shares_memory(self) -> bool:
        return super().shares_memory or self.processes > 1

    @property
    @override
    def checkpoint_interval(self) -> timedelta | None:
        return timedelta(seconds=self.checkpoint.every_seconds)

    @override
    def config(self, context: ConfigContext) -> TrainConfig:
        # The defaults, written out, are the same as an absent block, and so have the same identity. With startFrom this
        # is not so: an absent block then means the settings of the other adapter.
        blocks = {
            "lora": None
            if self.adapter == Lora() and not self.start_from
            else self.lora,
            "dpo": None if self.preference == Dpo() else self.dpo,
            "processes_per_node": self._processes_per_node,
            "parallelism": self.parallelism if self.processes > 1 else "DDP",
        }
        return TrainConfig(
            identity="",
            seed=context.seed,
            prepare=context.identities["prepare"],
            model=context.model,
            model_pin=context.statuses["prepare"].model_pin,
            model_digest=context.statuses["prepare"].model_digest,
            start_pin=context.statuses["prepare"].start_pin,
            start_digest=context.statuses["prepare"].start_digest,
            recipe=recipe_from(self, TrainRecipe).model_copy(update=blocks),
            checkpoint=self.checkpoint,
            samples=self.samples,
            tracking=context.tracking,
        )
