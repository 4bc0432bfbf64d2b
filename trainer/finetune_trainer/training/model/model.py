"""The model in training: its loss, whatever the method of training."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer

from finetune_trainer.contract import TrainRecipe
from finetune_trainer.models.isolation import (
    PROBE_LENGTH,
    not_isolated,
    probe_rows,
)
from finetune_trainer.models.structure import (
    layers_of,
    no_checkpointing,
    no_layers,
)
from finetune_trainer.training.batches import Batch, Documents
from finetune_trainer.training.distributed.sharding import (
    drop_gathered,
    sharded_like,
)
from finetune_trainer.training.methods.trainable import Trainable
from finetune_trainer.training.model.dropout import speed_up_dropout
from finetune_trainer.training.model.embedding_noise import (
    document_lengths,
    embedding_noise,
)
from finetune_trainer.training.model.lora_kernels import speed_up_lora
from finetune_trainer.training.model.loss import (
    Reduction,
    captured_head_input,
    chunk_size,
    chunked_cross_entropy,
    head_at_positions,
)

ISOLATION_TOLERANCE = 0.05
"""Maximum difference as a share of the logits' standard deviation.

It is larger than the rounding of bf16 and much smaller than the effect of one document on another.
"""


class TrainedModel:
    """A model in training: its loss, and the weights that training changes."""

    def __init__(
        self,
        trainable: Trainable,
        device: torch.device,
        recipe: TrainRecipe,
        *,
        plain_head: bool | None = None,
    ) -> None:
        """Prepare the model; `plain_head` is the answer of `has_plain_head`, which None asks for."""
        self.model = trainable.module
        self.weights = trainable.weights
        self.device = device
        self.format = trainable.format
        self.is_flat = False
        """Whether batches are flat, because attention takes the boundaries of documents instead of a mask."""
        self.masked_attention = str(self.base.config._attn_implementation)  # noqa: SLF001  there is no public name
        """Name in the registry of transformers of the attention that takes a mask, as the model was loaded."""
        self.trainable = {
            name: p for name, p in self.model.named_parameters() if p.requires_grad
        }
        self._autocast = recipe.dtype == "BF16"
        self._noise = recipe.neftune_noise_alpha
        self._is_compiled = recipe.compile
        self._rows = recipe.micro_batch_size
        self.largest_loss = math.inf
        """Number of targets whose logits are computed at once."""
        # In chunks the head runs by itself, so what the model does to logits after it would be left out.
        if plain_head is None:
            plain_head = has_plain_head(self)
        if plain_head:
            self.largest_loss = chunk_size(self.vocabulary)
        speed_up_dropout(self.model)
        speed_up_lora(self.model)
        if self._autocast:
            _keep_input_dtype(self.model)
        if recipe.gradient_checkpointing:
            if not self.base.supports_gradient_checkpointing:
                raise no_checkpointing(self.architecture)
            self.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        if self._is_compiled:
            self._compile_layers()

    def _compile_layers(self) -> None:
        """Compile each layer; raise ConfigInvalid if the architecture has none."""
        # A setting of the whole process, because `compile` has no option for it. By chance, a batch may have as many
        # tokens as the model has dimensions, and the next batch has not. Without this setting, the compiler takes
        # the two for the same size, and the first batch's number of tokens for a constant.
        torch.fx.experimental._config.use_duck_shape = False  # noqa: SLF001  there is no public name
        # Layer by layer: they are equal, so the compiler works once, and the selection of targets stays outside.
        layers = layers_of(self.model)
        if not layers:
            raise no_layers(self.architecture)
        for layer in layers:
            layer.compile(dynamic=True)

    def use_flat_attention(self, name: str) -> None:
        """Set the attention with this name in transformers, which takes the boundaries of documents."""
        self.base.set_attn_implementation(name)
        self.is_flat = True

    def use_masked_attention(self) -> None:
        """Set the attention with which the model was loaded, which takes a mask."""
        self.base.set_attn_implementation(self.masked_attention)
        self.is_flat = False

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """Return the cross-entropy summed over the targets of a micro-batch, a scalar in fp32."""
        return self.cross_entropy(batch, "sum")

    def cross_entropy(self, batch: Batch, reduction: Reduction) -> torch.Tensor:
        """Return the cross-entropy of the N targets of a micro-batch in fp32: their sum, or each [N].

        Documents packed into one row cannot attend to each other. Their positions restart at 0, and there is neither
        an attention mask nor a cache. For such inputs transformers builds a block-diagonal causal mask, unless the
        batch is flat.
        """
        batch = batch.to(self.device)
        if (
            self._is_compiled
            and not batch.documents
            and len(batch.tokens) == 1 < self._rows
        ):
            # The compiler takes a single row for a constant, and would work anew for it.
            batch = batch.doubled()
        if len(batch.targets) > self.largest_loss:
            return self._chunked_cross_entropy(batch, reduction)
        with (
            self._noise_of(batch),
            head_at_positions(batch.target_positions, self.head) as select,
        ):
            logits = select(self.logits(batch.tokens, batch.positions, batch.documents))
        return torch.nn.functional.cross_entropy(
            logits.float(), batch.targets, reduction=reduction
        )

    def _chunked_cross_entropy(
        self, batch: Batch, reduction: Reduction
    ) -> torch.Tensor:
        with self._noise_of(batch), captured_head_input(self.head) as captured:
            self.logits(batch.tokens, batch.positions, batch.documents)
        inputs = captured[0].flatten(0, 1).index_select(0, batch.target_positions)
        with self.autocast():
            return chunked_cross_entropy(
                self.head, inputs, batch.targets, int(self.largest_loss), reduction
            )

    @property
    def architecture(self) -> str:
        """Name of the model's class in transformers."""
        return type(self.base).__name__

    @property
    def base(self) -> Any:
        """The model of transformers, without PEFT's model around it."""
        if isinstance(self.model, PeftModel):
            return self.model.get_base_model()
        return self.model

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model has an embedding of."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def positions(self) -> float:
        """Number of positions that the model has; infinite if its config does not say."""
        return (
            getattr(self.base.config.get_text_config(), "max_position_embeddings", None)
            or math.inf
        )

    @property
    def head(self) -> Any:
        """The output head, or None."""
        return self.model.get_output_embeddings()

    def _noise_of(self, batch: Batch) -> AbstractContextManager[None]:
        """Return the context in which the batch's embeddings are noisy, if the recipe asks for that."""
        if self._noise is None or not self.model.training:
            return nullcontext()
        lengths = document_lengths(batch.positions, batch.is_padding)
        return embedding_noise(self.model.get_input_embeddings(), lengths, self._noise)

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        documents: Documents | None = None,
    ) -> torch.Tensor:
        """Return the model's logits of tokens [B, L], whose positions are 0 at the first token of every document."""
        lengths: dict[str, Any] = {}
        if documents is not None:
            lengths = {
                "cu_seq_lens_q": documents.boundaries,
                "max_length_q": documents.longest,
            }
        # No cache: it is for generation, and would keep the keys and values of every layer.
        with self.autocast():
            output = self.model(
                input_ids=tokens, position_ids=positions, use_cache=False, **lengths
            )
        logits: torch.Tensor = output.logits
        return logits

    def autocast(self) -> torch.autocast:
        """Return the context of every forward pass. The trained weights stay in fp32, but are computed in bf16, too."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast)

    def eager(self) -> AbstractContextManager[None]:
        """Return the context in which compiled layers run as they are: with a cache, each would be compiled anew."""
        if not self._is_compiled:
            return nullcontext()
        stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
        return stance

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy weights with the same names and shapes into the parameters."""
        drop_gathered(self.model)
        for name, tensor in self.weights.items():
            tensor.detach().copy_(sharded_like(weights[name], tensor))


def _keep_input_dtype(model: torch.nn.Module) -> None:
    """Set PEFT's layers to take their input as it is: autocast would round a copy in fp32 to the same bf16 again.

    DoRA's layers keep the cast, because DoRA computes in fp32.
    """
    for module in model.modules():
        if isinstance(module, LoraLayer) and not module.lora_magnitude_vector:
            module.cast_input_dtype_enabled = False


def has_plain_head(model: TrainedModel) -> bool:
    """Return whether the logits are the output of the head, neither scaled nor capped after it."""
    if model.head is None:
        return False
    outputs: list[torch.Tensor] = []
    hook = model.head.register_forward_hook(
        lambda _module, _inputs, output: outputs.append(output)
    )
    try:
        logits = probe(model)
    finally:
        hook.remove()
    # Exactly equal: any operation after the head would change some bits.
    return bool(torch.equal(outputs[0].float().view(logits.shape), logits))


def check_isolation(model: TrainedModel, uri: str) -> None:
    """Raise ConfigInvalid if a packed document changes the logits of the document after it.

    Some architectures ignore restarting positions. The check runs two rows that differ only in their first
    document; the logits of their second document must be equal.
    """
    first, second = probe(model)[:, PROBE_LENGTH:]
    if not are_close(first, second):
        raise not_isolated(uri, model.architecture)


def probe(model: TrainedModel, *, training: bool = False) -> torch.Tensor:
    """Return the logits of two rows of two documents each; the second documents are equal. Without dropout by default.

    Compiled layers run as they are, so that nothing is compiled for these rows.
    """
    tokens, positions = probe_rows()
    documents = None
    shape: tuple[int, ...] = tokens.shape
    if model.is_flat:
        documents = Documents.at(positions.numpy()).to(model.device)
        shape = (1, -1)
    model.model.train(training)
    gpus = [model.device] if model.device.type == "cuda" else []
    # The generators are restored: a probe must not change what training draws.
    with torch.random.fork_rng(gpus), torch.no_grad(), model.eager():
        logits = model.logits(
            tokens.to(model.device).view(shape),
            positions.to(model.device).view(shape),
            documents,
        )
    return logits.float().view(*tokens.shape, -1)


def are_close(logits: torch.Tensor, others: torch.Tensor) -> bool:
    """Return whether other logits differ by rounding only. A broken model passes: training reports it."""
    if not logits.isfinite().all():
        return True
    return bool((logits - others).abs().max() <= ISOLATION_TOLERANCE * logits.std())
