"""The model in training: its loss, whatever the method of training."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import save_file

from finetune_trainer.contract import TrainRecipe
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.training.batches import Batch
from finetune_trainer.training.determinism import Tensors
from finetune_trainer.training.embedding_noise import embedding_noise
from finetune_trainer.training.loss import head_at_positions

ISOLATION_TOLERANCE = 0.05
"""Maximum difference as a share of the logits' standard deviation.

It is larger than the rounding of bf16 and much smaller than the effect of one document on another.
"""

FILE_MODE = 0o644
"""safetensors creates files readable by their owner only, but the serving container may run as another user."""


@dataclass(frozen=True)
class WeightsFormat:
    """The files from which PEFT or transformers loads trained weights."""

    file: str
    """Name of the safetensors file."""
    others: Mapping[str, bytes]
    """The files beside it, by name. Their bytes are the same in any process."""

    def write(self, weights: Tensors, folder: Path) -> None:
        """Write the files; raise OSError if that fails."""
        save_tensors(weights, folder / self.file)
        for name, content in self.others.items():
            (folder / name).write_bytes(content)


@dataclass(frozen=True)
class Trainable:
    """A loaded model, prepared by a method of training."""

    module: Any
    """A model of transformers, or PEFT's around one."""
    weights: Tensors
    """What is saved: tensors by their names in the file, which share memory with the parameters that are trained."""
    format: WeightsFormat


class TrainedModel:
    """A model in training: its loss, and the weights that training changes."""

    def __init__(self, trainable: Trainable, device: torch.device, recipe: TrainRecipe) -> None:
        self.model, self.weights, self.device = trainable.module, trainable.weights, device
        self.format = trainable.format
        self.trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._autocast, self._noise = recipe.dtype == "BF16", recipe.neftune_noise_alpha
        if recipe.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if recipe.compile:
            self.model.compile()

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """Return the cross-entropy summed over the targets of a micro-batch, a scalar in fp32.

        Documents packed into one row cannot attend to each other. Their positions restart at 0, and there is neither
        an attention mask nor a cache. For such inputs transformers builds a block-diagonal causal mask.
        """
        batch = batch.to(self.device)
        with self._noise_of(batch), head_at_positions(batch.target_positions, self._head) as select:
            logits = select(self.logits(batch.tokens, batch.positions))
        return torch.nn.functional.cross_entropy(logits.float(), batch.targets, reduction="sum")

    @property
    def architecture(self) -> str:
        """Name of the model's class in transformers."""
        model = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        return type(model).__name__

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model has an embedding of."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def _head(self) -> Any:
        return self.model.get_output_embeddings()

    def _noise_of(self, batch: Batch) -> AbstractContextManager[None]:
        """Return the context in which the batch's embeddings are noisy, if the recipe asks for that."""
        if self._noise is None or not self.model.training:
            return nullcontext()
        return embedding_noise(self.model.get_input_embeddings(), batch.positions, self._noise)

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the model's logits of tokens [B, L], whose positions are 0 at the first token of every document."""
        # What is trained is stored in fp32; autocast computes with it in bf16, too.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            output = self.model(input_ids=tokens, position_ids=positions, use_cache=False)
        found: torch.Tensor = output.logits
        return found

    def load(self, weights: Tensors) -> None:
        """Copy weights with the same names and shapes into the parameters."""
        for name, tensor in self.weights.items():
            tensor.detach().copy_(weights[name])


def check_isolation(model: TrainedModel, uri: str) -> None:
    """Raise ConfigInvalid if a packed document changes the logits of the document after it.

    Some architectures ignore restarting positions. The check runs two rows that differ only in their first
    document; the logits of their second document must be equal.
    """
    length = 8
    tokens = torch.arange(2 * length, device=model.device).repeat(2, 1)
    tokens[1, :length] = tokens[0, :length].flip(0)
    positions = (torch.arange(2 * length, device=model.device) % length).repeat(2, 1)
    model.model.eval()
    with torch.inference_mode():
        logits = model.logits(tokens, positions).float()
    first, second = logits[:, length:]
    if (first - second).abs().max() > ISOLATION_TOLERANCE * first.std():
        raise ConfigInvalid(
            f"model {uri}: documents packed into one row attend to each other in this architecture "
            f"({model.architecture}): set prepare.packing to false"
        )


def save_tensors(tensors: Tensors, path: Path) -> None:
    """Write a safetensors file; raise OSError if that fails."""
    try:
        save_file(tensors, os.fspath(path), metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error
    path.chmod(FILE_MODE)


def copy_to_cpu(tensors: Tensors) -> Tensors:
    """Return copies of the tensors in CPU memory, which training does not write to."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
