"""Translate errors of memory and of PyTorch into errors of a stage, which are permanent or temporary."""

import re
import sys
from typing import Any

from finetune_trainer.contract import (
    AnyConfig,
    Environment,
    EvaluateConfig,
    PrepareConfig,
    TrainConfig,
    TrainRecipe,
)
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    DeviceFailed,
    ServiceUnavailable,
    StageError,
)
from finetune_trainer.runtime.stage_folder import read_config

GIB = 1024**3
# Beside PyTorch's allocator, this process uses memory of the GPU for the context, libraries and fragmentation. It takes
# at most OWN_BYTES and this share of the GPU's memory; more belongs to other processes.
OWN_SHARE = 0.05
OWN_BYTES = GIB

HOST_MEMORY = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory")
GPU_MEMORY = re.compile(r"(CUDA|HIP) (error: )?out of memory")
NOT_DETERMINISTIC = re.compile(
    r"does not have a deterministic implementation|operation is not deterministic"
)
NO_COMPILER = re.compile(r"No working C\+\+ compiler|Failed to find C compiler")
"""Matches messages of PyTorch on a CPU, and of Triton on a GPU."""
GPU_ERROR = re.compile(r"(CUDA|HIP) error")


def translate(
    error: Exception, config: AnyConfig, environment: Environment
) -> StageError | None:
    """Return the stage's error for an error of memory or of PyTorch, or None for any other error.

    Errors that depend on the config alone are permanent. Errors of hardware, and of a GPU that other processes use,
    are temporary.
    """
    text = str(error)
    if isinstance(error, MemoryError) or HOST_MEMORY.search(text):
        fixes = [f"raise {config.stage}.pod.resources.limits.memory"]
        fixes += ways_to_save_memory(config, environment)
        return ConfigInvalid(
            f"out of memory ({text or 'MemoryError'}): {', or '.join(fixes)}"
        )
    # Not imported, which takes seconds: a stage that has not imported torch does not raise its errors.
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(error, RuntimeError):
        return None
    return _of_torch(torch, error, config, environment)


def _of_torch(
    torch: Any, error: Exception, config: AnyConfig, environment: Environment
) -> StageError | None:
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or GPU_MEMORY.search(text):
        # The rest of the message is advice on PyTorch's allocator, which is of no use in a manifest.
        cause, _, _ = text.partition(" If reserved but unallocated")
        return _gpu_memory(torch, cause, config, environment)
    if NOT_DETERMINISTIC.search(text):
        return ConfigInvalid(
            f"an operation of this model has no deterministic implementation on this device, so a resumed run could "
            f"not be exact: {_first_sentence(text)}: use another base model, or train it on another kind of device"
        )
    if NO_COMPILER.search(text):
        return ConfigInvalid(
            "train.compile needs a C compiler, and this image has none: set train.pod.image to finetune-trainer, or to "
            "another image with gcc, g++ and the headers of Python; or remove train.compile"
        )
    if isinstance(error, torch.AcceleratorError) or GPU_ERROR.search(text):
        return DeviceFailed(
            f"the GPU failed, which may be an error of hardware: {text.splitlines()[0]}: the next attempt resumes; "
            "if it happens again on this node, take the node out of service"
        )
    return None


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[a-z)'])\. ", text, maxsplit=1)[0]


def _gpu_memory(
    torch: Any, text: str, config: AnyConfig, environment: Environment
) -> StageError:
    foreign, total = _foreign_memory(torch)
    if foreign > OWN_SHARE * total + OWN_BYTES:
        return ServiceUnavailable(
            f"out of GPU memory, because other processes use {foreign / GIB:.1f} of its {total / GIB:.1f} GiB: "
            f"wait for them to end, or give this stage a GPU of its own: {text}"
        )
    ways = [*ways_to_save_memory(config, environment), "use a GPU with more memory"]
    return ConfigInvalid(f"out of GPU memory: {', or '.join(ways)}: {text}")


def _foreign_memory(torch: Any) -> tuple[int, int]:
    """Return the bytes of the GPU's memory that other processes use, and its total size in bytes."""
    try:
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved(), total
    except (RuntimeError, AssertionError):
        # There is no GPU, or it no longer answers.
        return 0, 0


def ways_to_save_memory(config: AnyConfig, environment: Environment) -> list[str]:
    """Return the change of the manifest that saves memory and costs least; an empty list if there is none."""
    match config:
        case TrainConfig():
            return [
                _train_with_less(config.recipe, context_length(config, environment))
            ]
        case EvaluateConfig():
            return _evaluate_with_less(config.recipe.batch_size)
        case _:
            return []


def _evaluate_with_less(batch_size: int | None) -> list[str]:
    if batch_size == 1:
        return []
    smaller = batch_size // 2 if batch_size else 1
    return [f"set evaluate.batchSize: {smaller}"]


def _train_with_less(recipe: TrainRecipe, length: int | None) -> str:
    size = recipe.micro_batch_size
    if size > 1:
        # The smallest divisor, so that a step has the same rows.
        factor = next(number for number in range(2, size + 1) if size % number == 0)
        accumulation = recipe.gradient_accumulation_steps * factor
        return (
            f"set train.microBatchSize: {size // factor} and train.gradientAccumulationSteps: {accumulation}: "
            "a step has the same rows, and training starts again"
        )
    if not recipe.gradient_checkpointing:
        return "set train.gradientCheckpointing: true, which is slower; training starts again"
    if length is None:
        return "halve prepare.contextLength"
    return f"set prepare.contextLength: {length // 2}"


def context_length(config: TrainConfig, environment: Environment) -> int | None:
    """Return the length of the packed rows, or None if the trainer did not write them."""
    prepare = read_config(environment.stage_dir("prepare", config.prepare))
    return prepare.recipe.context_length if isinstance(prepare, PrepareConfig) else None
