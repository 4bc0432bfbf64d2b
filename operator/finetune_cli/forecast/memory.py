"""The memory that a training needs, and the GPUs that have less: lines for `finetune plan`."""

from collections.abc import Iterator

from finetune_cli.forecast.gpu_memory import GIB, MIB, Gpu, gpus_of
from finetune_cli.manifest.fields import has_own_program
from finetune_operator.api.placement import PlacementDefaults
from finetune_operator.api.spec import PipelineSpec
from finetune_trainer.contract.memory import MemoryEstimate
from finetune_trainer.contract.preview import PreviewReport

NOT_HERE = "the base model is not on this machine"


def memory_lines(
    spec: PipelineSpec,
    report: PreviewReport | None,
    defaults: PlacementDefaults | None,
    unknown: str = NOT_HERE,
) -> Iterator[str]:
    """Yield the memory of each process with its parts, and a line for each kind of GPU that has less.

    `unknown` is the reason why there is no report.
    """
    if has_own_program(spec.train):
        return
    if report is None or report.memory is None:
        reason = report.memory_unknown if report else ""
        yield f"train: memory not known: {reason or unknown}"
        return
    memory = report.memory
    yield _line(spec, memory)
    if memory.device_bytes:
        yield from _too_small(spec, memory, Gpu("this machine", memory.device_bytes))
    for gpu in gpus_of(spec.stages()["train"], defaults):
        yield from _too_small(spec, memory, gpu)


def _line(spec: PipelineSpec, memory: MemoryEstimate) -> str:
    train = spec.train
    trained = "all weights" if train.method == "Full" else "adapter"
    sizes = {
        "frozen base model": memory.frozen_weights,
        trained: memory.trained_weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
    }
    known = [f"{size_text(size)} {name}" for name, size in sizes.items() if size]
    parts = ", ".join(known)
    scope = " for each process" if train.processes > 1 else ""
    line = f"train: about {size_text(memory.total)} of memory{scope}"
    if memory.activations is None:
        line = f"train: more than {size_text(memory.total)} of memory{scope}"
        parts += f"; activations not known: {memory.activations_unknown}"
    else:
        parts += (
            f" of {train.micro_batch_size} x {spec.prepare.context_length:,} tokens"
        )
    count = f"{_count(memory.parameters)} parameters, {_count(memory.trained_parameters)} trained"
    return f"{line} ({parts}), {count}; PyTorch itself takes more"


def _too_small(spec: PipelineSpec, memory: MemoryEstimate, gpu: Gpu) -> Iterator[str]:
    if memory.total <= gpu.size:
        return
    needed = size_text(memory.total)
    problem = f"the GPU of {gpu.place} has {size_text(gpu.size)}"
    yield f"train: needs about {needed}, and {problem}: {_fix(spec, memory)}"


def _fix(spec: PipelineSpec, memory: MemoryEstimate) -> str:
    """Return what makes the largest part smaller."""
    train = spec.train
    fixes = []
    if (memory.activations or 0) > memory.total // 2:
        if train.micro_batch_size > 1:
            fixes.append("lower train.microBatchSize")
        if not train.gradient_checkpointing:
            fixes.append("set train.gradientCheckpointing to true")
        fixes.append("lower prepare.contextLength")
    elif train.method == "Full":
        fixes.append("set train.method to LoRA")
    elif train.method == "LoRA":
        fixes.append("set train.method to QLoRA")
    return ", ".join([*fixes, "or choose larger GPUs"])


def size_text(size: int | None) -> str:
    """Return a number of bytes as people read it."""
    size = size or 0
    if 0 < size < MIB:
        return "less than 1 MiB"
    if size < GIB:
        return f"{size / MIB:,.0f} MiB"
    return f"{size / GIB:,.1f} GiB"


def _count(number: int) -> str:
    """Return a large number of weights as people read it."""
    # As in the names of models: 7B.
    letters = {10**9: "B", 10**6: "M", 10**3: "k"}
    for limit, letter in letters.items():
        if number >= limit:
            return f"{number / limit:.3g} {letter}"
    return str(number)
