"""Adapters in the form in which the stage train writes them."""

import json
import os
from pathlib import Path

from finetune_trainer.runtime.artifacts import atomic_folder, seal

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def make_adapter(
    output: Path,
    base: Path,
    *,
    seed: int = 1,
    rank: int = 4,
    scale: float = 4.0,
    **variant: bool,
) -> Path:
    """Write a random LoRA adapter, strong enough to change the tiny model's output, and seal its folder."""
    import torch  # noqa: PLC0415  tests without a model must not wait for torch
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    torch.manual_seed(seed)
    lora = LoraConfig(
        r=rank,
        lora_alpha=scale * rank,
        target_modules="all-linear",
        init_lora_weights=False,
        **variant,
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    with atomic_folder(output) as folder:
        model.save_pretrained(folder, save_embedding_layers=False)
        (folder / "README.md").unlink()
        config = json.loads((folder / "adapter_config.json").read_text())
        config["target_modules"].sort()
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))
        seal(folder)
    return output
