"""Small models on the device, read from files: each method of training, and attention by boundaries of documents."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typing_extensions import override

from finetune_trainer.contract import Environment, TrainConfig
from finetune_trainer.data.documents import Document
from finetune_trainer.data.packing.rows import PackedRows
from finetune_trainer.data.packing.writer import PackedWriter
from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.runtime.artifacts import digest_file
from finetune_trainer.runtime.stage_folder import Context
from finetune_trainer.stages import train
from finetune_trainer.stop_signal import StopSignal
from finetune_trainer.training.batches import Batch, load_batch
from finetune_trainer.training.methods import registry
from finetune_trainer.training.model import document_attention
from finetune_trainer.training.model.model import TrainedModel
from train_bench import large_model
from train_bench.measuring import StepTimes, make_pairs, make_rows

SHAPES: dict[str, dict[str, int]] = {
    "8b": {
        "vocab_size": 32_000,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 1024,
    },
    "tiny": large_model.SHAPES["tiny"][0]
    | {"max_position_embeddings": large_model.SHAPES["tiny"][1]},
}
"""The small model beside each large one: 0.19 billion weights, or the same tiny model."""
ADAPTER = {"rank": 16, "alpha": 32, "dropout": 0.05}
METHODS: dict[str, dict[str, Any]] = {
    "LoRA": {"lora": ADAPTER},
    "QLoRA": {"lora": ADAPTER, "method": "QLoRA"},
    "Full": {"method": "Full"},
    "DPO": {"lora": ADAPTER, "objective": "DPO"},
    "8-bit AdamW": {"lora": ADAPTER, "optimizer": {"name": "AdamW8Bit"}},
    "gradient checkpointing": {"lora": ADAPTER, "gradient_checkpointing": True},
    "compiled layers": {"lora": ADAPTER, "compile": True},
}
"""The recipes whose interrupted runs are compared with whole ones."""
STEPS = 12
SAVED_EVERY = 3
INTERRUPTED = 8
"""Steps of these runs, between their checkpoints, and before the interruption."""


class Interrupted(Exception):
    """Ends a run in the middle, as the death of its process does."""


class InterruptedAtStep(StepTimes):
    """Ends the run after step INTERRUPTED. What is being written then becomes durable, unlike after a kill."""

    @override
    def update(self, **fields: object) -> None:
        super().update(**fields)
        if fields.get("step") == INTERRUPTED:
            raise Interrupted


class Resumed(StepTimes):
    """Raises RuntimeError if the run begins anew."""

    @override
    def update(self, **fields: object) -> None:
        super().update(**fields)
        if self.start_step == 0:
            raise RuntimeError("the run began anew")


class SmallModels:
    """The small model, its rows, and what is compared."""

    def __init__(self, folder: Path, shape: str, device: str) -> None:
        self.folder = folder
        self.device = device
        self.llama = LlamaConfig(**SHAPES[shape], dtype="bfloat16")

    def write(self) -> None:
        """Write the model, and rows for each objective."""
        torch.manual_seed(0)
        LlamaForCausalLM(self.llama).to(torch.bfloat16).save_pretrained(
            self.folder / "model"
        )
        sizes = {
            "context": self.llama.max_position_embeddings,
            "vocabulary": self.llama.vocab_size,
        }
        make_rows(self.folder / "SFT", 64, 1.0, **sizes)
        make_pairs(self.folder / "DPO", 32, 0.5, **sizes)

    def config(self, identity: str, **changes: Any) -> TrainConfig:
        """Return the config of a run."""
        recipe = {
            "max_steps": STEPS,
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "dtype": "BF16",
        }
        content = {
            "identity": identity,
            "prepare": "rows",
            "model": {"uri": f"file://{self.folder / 'model'}"},
            "recipe": recipe | changes,
            "checkpoint": {"every_steps": SAVED_EVERY},
        }
        return TrainConfig.model_validate(content)

    def resumes(self) -> dict[str, Any]:
        """Return for each method whether an interrupted run has the weights of one that was not, or an error."""
        outcomes: dict[str, Any] = {}
        for name, recipe in METHODS.items():
            try:
                outcomes[name] = self._resumes(**recipe)
            except Exception as error:  # noqa: BLE001  the other methods must run
                outcomes[name] = f"{type(error).__name__}: {error}"
        return outcomes

    def _resumes(self, **recipe: Any) -> bool:
        workspace = self.folder / str(recipe.get("objective", "SFT"))
        for name in ("whole", "again"):
            shutil.rmtree(workspace / "train" / name, ignore_errors=True)
        whole = self._run(workspace, self.config("whole", **recipe))
        try:
            self._run(workspace, self.config("again", **recipe), InterruptedAtStep)
        except Interrupted:
            return whole == self._run(
                workspace, self.config("again", **recipe), Resumed
            )
        raise RuntimeError("the run was not interrupted")

    @staticmethod
    def _run(
        workspace: Path, config: TrainConfig, progress: type[StepTimes] = StepTimes
    ) -> str:
        """Run the train stage; return the digest of the trained weights."""
        environment = Environment(workspace, manifest_dir=workspace)
        stage = environment.stage_dir("train", config.identity)
        stage.mkdir(parents=True, exist_ok=True)
        train.run(
            config,
            Context(environment, stage, progress(environment, "wall"), StopSignal()),
        )
        (weights,) = (stage / "output").glob("*.safetensors")
        return digest_file(weights)

    def attention(self) -> dict[str, Any]:
        """Return how far loss and gradients of packed documents are from the values of one document a row.

        The latter are computed in fp32 on the CPU, the others in bf16 on the device: with a mask and, on a GPU, by the
        boundaries of the documents. Gradients are compared by the norm of their difference, as a share of their own.
        """
        rows = {
            name: self._documents(packing=name == "packed")
            for name in ("packed", "alone")
        }
        count = len(rows["alone"])
        expected = self._gradients(
            "cpu", "FP32", load_batch(rows["alone"], range(count))
        )
        packed = range(len(rows["packed"]))
        distances: dict[str, Any] = {}
        for name, flat in (
            {"mask": False} | ({"boundaries": True} if self.device == "cuda" else {})
        ).items():
            batch = load_batch(rows["packed"], packed, flat=flat)
            loss, gradients = self._gradients(self.device, "BF16", batch, flat=flat)
            distances[name] = {
                "loss": abs(loss / expected[0] - 1),
                "gradients": float(
                    (gradients - expected[1]).norm() / expected[1].norm()
                ),
            }
        return distances | {"documents": count, "rows": len(packed)}

    def _documents(self, *, packing: bool) -> PackedRows:
        """Write random documents of unequal lengths, packed or each in a row of its own."""
        random = np.random.Generator(np.random.Philox(2))
        context = self.llama.max_position_embeddings
        folder = self.folder / ("packed" if packing else "alone")
        folder.mkdir()
        with PackedWriter(folder, context, 0, packing=packing) as writer:
            for _ in range(12):
                length = int(random.integers(6, context // 2))
                tokens = random.integers(2, self.llama.vocab_size, length, dtype="<i4")
                writer.add(
                    "train", Document(tokens, (np.arange(length) > 2).astype("u1"))
                )
        return PackedRows(folder, "train")

    def _gradients(
        self, device: str, dtype: str, batch: Batch, *, flat: bool = False
    ) -> tuple[float, torch.Tensor]:
        """Return the loss and all gradients, in fp32 on the CPU."""
        config = self.config(
            "compared", dtype=dtype, lora={"rank": 16, "alpha": 32, "dropout": 0.0}
        )
        place = torch.device(device)
        trainable = registry.load_trainable(
            BaseModel("model", self.folder / "model", ""), config, place
        )
        model = TrainedModel(trainable, place, config.recipe)
        generator = torch.Generator().manual_seed(0)
        for parameter in (
            model.trainable.values()
        ):  # as they begin, half of them would have no gradient
            parameter.data.copy_(
                0.05 * torch.randn(parameter.shape, generator=generator)
            )
        if flat and not document_attention.enable(model, dtype):
            raise RuntimeError("attention kept its mask")
        model.model.train()
        loss = model.loss_sum(batch)
        loss.backward()
        gradients = [
            parameter.grad.float().cpu().flatten()
            for parameter in model.trainable.values()
        ]
        return loss.item(), torch.cat(gradients)
