"""Start the training of a LoRA adapter: from a new adapter, or from the weights of an existing adapter."""

from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from finetune_trainer.contract import Lora, TrainConfig
from finetune_trainer.contract.uris import hub_id
from finetune_trainer.models.start_adapter import StartAdapter
from finetune_trainer.models.trained.merged_weights import ADAPTER_WEIGHTS
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.runtime.progress.progress import log_line
from finetune_trainer.training.determinism import Tensors
from finetune_trainer.training.methods.lora import trainable_adapter
from finetune_trainer.training.methods.trainable import Trainable

UNSUPPORTED = (
    "rank_pattern",
    "alpha_pattern",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
)
"""Settings of an adapter that the recipe has no words for; they are empty in an adapter of this trainer."""
PLAIN_STARTS = ("gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the base model as it is. With others, such as pissa, PEFT changes it."""


def started_adapter(
    base: Any, config: TrainConfig, start: StartAdapter | None
) -> Trainable:
    """Freeze the model and add an adapter, new or with the weights of `start`. Raise ConfigInvalid if that fails.

    The settings come from the recipe. If it has none, they come from `start`.
    """
    if start is None:
        _check_compile(config, config.recipe.adapter)
        return trainable_adapter(base, config.recipe.adapter, config.model, config.seed)
    _check_supported(start)
    _warn_of_another_model(start, config.model.uri)
    if config.recipe.lora is not None:
        _check_settings(config.recipe.lora, start)
    lora = config.recipe.lora or lora_of(start)
    _check_compile(config, lora)
    trainable = trainable_adapter(base, lora, config.model, config.seed)
    # The optimizer begins anew: an adapter's folder holds no state of it.
    _load(trainable.weights, start)
    return trainable


def _check_compile(config: TrainConfig, lora: Lora) -> None:
    """Raise ConfigInvalid for DoRA: the compiler cannot trace all of PEFT's, and gives up at its limit."""
    if config.recipe.compile and lora.variant == "DoRA":
        raise ConfigInvalid(
            "train.compile: DoRA cannot be compiled: set compile to false, or lora.variant to RsLoRA"
        )


def lora_of(start: StartAdapter) -> Lora:
    """Return the settings of an adapter."""
    config = start.config
    # Not validated: an adapter may name every layer by itself, which are more names than a manifest may have.
    return Lora.model_construct(
        rank=config["r"],
        alpha=config["lora_alpha"],
        dropout=config.get("lora_dropout") or 0.0,
        target_modules=tuple(config["target_modules"]),
        modules_to_save=_modules_to_save(config),
        variant=_variant(config),
    )


def _modules_to_save(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the layers that are trained whole, without layers that PEFT has added because of a shared weight."""
    # PEFT adds them by their whole names.
    names = config.get("modules_to_save") or ()
    chosen = tuple(name for name in names if "." not in name)
    return chosen or tuple(name.rpartition(".")[2] for name in names)


def _variant(config: dict[str, Any]) -> Literal["LoRA", "RsLoRA", "DoRA"]:
    if config.get("use_dora"):
        return "DoRA"
    if config.get("use_rslora"):
        return "RsLoRA"
    return "LoRA"


def _check_supported(start: StartAdapter) -> None:
    config = start.config
    unsupported = [name for name in UNSUPPORTED if config.get(name)]
    if config.get("bias") not in {None, "none"}:
        unsupported.append(f"bias {config['bias']}")
    start_weights = config.get("init_lora_weights")
    if isinstance(start_weights, str) and start_weights not in PLAIN_STARTS:
        unsupported.append(f"init_lora_weights {start_weights}")
    if config.get("lora_bias"):
        unsupported.append("lora_bias")
    if config.get("use_dora") and config.get("use_rslora"):
        unsupported.append("both use_dora and use_rslora")
    if not isinstance(config.get("target_modules"), list):
        unsupported.append("target_modules that are a pattern")
    if unsupported:
        raise ConfigInvalid(
            f"train.startFrom {start.uri} has {', '.join(unsupported)}, which train.lora cannot express"
        )


def _check_settings(lora: Lora, start: StartAdapter) -> None:
    """Raise ConfigInvalid if a setting of the recipe is not the adapter's; the dropout may differ."""
    theirs = lora_of(start)
    for field in ("rank", "alpha", "variant"):
        wanted = getattr(lora, field)
        actual = getattr(theirs, field)
        if wanted != actual:
            raise ConfigInvalid(
                f"train.lora.{field} is {wanted}, but the adapter of train.startFrom {start.uri} has {actual}: "
                "set the same, or remove lora to take all settings from the adapter"
            )


def _warn_of_another_model(start: StartAdapter, uri: str) -> None:
    named = start.config.get("base_model_name_or_path")
    # Only a repository of the hub has a name that is the same on another machine.
    this = hub_id(uri) or uri
    if named and (hub_id(str(named)) or str(named)) != this:
        log_line(
            f"train: the adapter of train.startFrom names the base model {named}, this pipeline has {uri}"
        )


def _load(weights: Tensors, start: StartAdapter) -> None:
    """Copy the weights of `start` into the new adapter; raise ConfigInvalid unless they are alike."""
    try:
        start_weights = load_file(start.folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigInvalid(
            f"train.startFrom {start.uri}: {ADAPTER_WEIGHTS} cannot be read: {error}"
        ) from None
    for names, problem in (
        (
            weights.keys() - start_weights.keys(),
            "does not adapt {}, as train.lora does",
        ),
        (start_weights.keys() - weights.keys(), "adapts {}, which train.lora does not"),
    ):
        if names:
            layers = sorted(
                {name.partition(".lora_")[0].rpartition(".")[2] for name in names}
            )
            targets = ", ".join(map(str, start.config["target_modules"]))[:200]
            raise ConfigInvalid(
                f"train.lora.targetModules: the adapter of train.startFrom {start.uri} "
                f"{problem.format(', '.join(layers)[:200])}; its layers are {targets}: "
                "name the same, or remove lora to take all settings from the adapter"
            )
    for name, tensor in weights.items():
        if (
            start_weights[name].shape != tensor.shape
            or not torch.isfinite(start_weights[name]).all()
        ):
            raise ConfigInvalid(
                f"train.startFrom {start.uri}: {name} is {list(start_weights[name].shape)} "
                f"and must be {list(tensor.shape)}, with finite values: it is an adapter of another model, or broken"
            )
        tensor.detach().copy_(start_weights[name])
