"""The methods of training: how the base model is loaded, and which of its weights are trained.

A new method is a function here and a line in METHODS, besides its name in the contract.
"""

import importlib.util
from collections.abc import Callable

import torch
from transformers import BitsAndBytesConfig
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from finetune_trainer.contract import TrainConfig
from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.models.loading import dtype_of, load_base
from finetune_trainer.models.start_adapter import StartAdapter
from finetune_trainer.models.trained.full_weights import config_of, trained_names
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.runtime.progress.progress import log_line
from finetune_trainer.training.methods.lora import expert_bytes
from finetune_trainer.training.methods.lora_start import started_adapter
from finetune_trainer.training.methods.trainable import Trainable, WeightsFormat

GIB = 1 << 30

Method = Callable[
    [BaseModel, TrainConfig, torch.device, StartAdapter | None], Trainable
]


def load_trainable(
    source: BaseModel,
    config: TrainConfig,
    device: torch.device,
    start: StartAdapter | None = None,
) -> Trainable:
    """Load the base model to the device and prepare it for the recipe's method; raise ConfigInvalid if that fails.

    An adapter starts with the weights of `start`, if that is given.
    """
    return METHODS[config.recipe.method](source, config, device, start)


def lora(
    source: BaseModel,
    config: TrainConfig,
    device: torch.device,
    start: StartAdapter | None,
) -> Trainable:
    """Train an adapter beside the base model, which is frozen in the recipe's dtype."""
    base = load_base(
        source.folder, dtype_of(config.recipe.dtype, source.folder), source.uri
    )
    return started_adapter(base.to(device), config, start)


def qlora(
    source: BaseModel,
    config: TrainConfig,
    device: torch.device,
    start: StartAdapter | None,
) -> Trainable:
    """Train an adapter beside the base model, which is frozen in 4 bits (Dettmers et al. 2023, arXiv:2305.14314).

    Each linear layer but the output head is stored as NF4, and its scales in 8 bits (double quantization).
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigInvalid(
            "train.method QLoRA needs bitsandbytes: pip install 'finetune-operator[qlora]'"
        )
    dtype = dtype_of(config.recipe.dtype, source.folder)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    base = load_base(
        source.folder,
        dtype,
        source.uri,
        quantization_config=quantization,
        device_map={"": device},
    )
    experts = expert_bytes(base)
    if experts:
        log_line(
            f"train: QLoRA quantizes linear layers only: the experts stay in 16 bits, {experts / GIB:,.1f} GiB"
        )
    for layer in (
        module
        for module in base.modules()
        if hasattr(module, "support_avx512bf16_for_cpu")
    ):
        # On some CPUs the first validation would round the scales to bf16 for good, and change the training after it.
        layer.support_avx512bf16_for_cpu = False
    return started_adapter(base, config, start)


def full(
    source: BaseModel,
    _config: TrainConfig,
    device: torch.device,
    start: StartAdapter | None,
) -> Trainable:
    """Train all weights, which are kept in fp32 whatever the recipe's dtype: smaller updates would be lost in bf16."""
    if start:
        raise ConfigInvalid(
            "train.method Full trains no adapter: remove startFrom, or set method to LoRA or QLoRA"
        )
    model = load_base(source.folder, torch.float32, source.uri).to(device)
    model.requires_grad_(False)
    weights = {}
    for name, stored_name in trained_names(model, source.folder).items():
        parameter = model.get_parameter(name).requires_grad_(True)
        weights[stored_name] = parameter.data
    return Trainable(
        model,
        weights,
        WeightsFormat(SAFE_WEIGHTS_NAME, {CONFIG_NAME: config_of(source.folder)}),
    )


METHODS: dict[str, Method] = {"LoRA": lora, "QLoRA": qlora, "Full": full}
"""By the name in `train.method`."""
