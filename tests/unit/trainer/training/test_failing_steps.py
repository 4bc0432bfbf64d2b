"""Steps that fail: what another attempt would meet again is permanent, what hardware did is not."""

import math
import os

import pytest
import torch
import torch._inductor.config
from support.trainer.stages import run_in_process, run_to_failure
from support.trainer.training import (
    PREPARED,
    adapter_digest,
    documents,
    environment,
    train_config,
    write_rows,
)

from finetune_trainer.contract import (
    EvaluateConfig,
    EvaluateRecipe,
    ExitCode,
    PrepareConfig,
    Task,
)
from finetune_trainer.runtime import device_errors
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.runtime.stage_folder import write_config
from finetune_trainer.training import loop
from finetune_trainer.training.validation import Validator

torch.set_num_threads(1)

GIB = 1024**3
CUDA_OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.00 GiB is "
    "free. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF"
)


@pytest.fixture
def workspace(tmp_path):
    write_rows(tmp_path, documents(60), documents(8, seed=5))
    return tmp_path


def config_for(model, **changes):
    return train_config(
        model,
        **{"max_steps": 6, "eval_steps": 4, "checkpoint": {"every_steps": 2}} | changes,
    )


class LossSums:
    """Stands in for accumulate_gradients; records what it returns and replaces the results of some calls."""

    def __init__(self, replaced):
        self.compute = loop.accumulate_gradients
        self.replaced = replaced
        self.returned = []

    def __call__(self, *arguments):
        loss_sum, *more = self.compute(*arguments)
        self.returned.append(self.replaced.get(len(self.returned), loss_sum))
        return [self.returned[-1], *more]


def test_step_that_is_finite_when_repeated_is_retried(
    tiny_model, workspace, monkeypatch
):
    """A flipped bit made the third step NaN. Repeated from the boundary, dropout included, it has the right value."""
    healthy = LossSums({})
    monkeypatch.setattr(loop, "accumulate_gradients", healthy)
    run_in_process(config_for(tiny_model, identity="w" * 16), environment(workspace))
    faulty = LossSums({2: math.nan})
    monkeypatch.setattr(loop, "accumulate_gradients", faulty)
    message, code = run_to_failure(config_for(tiny_model), environment(workspace))
    assert code == ExitCode.BUG
    assert "step 3: the loss sum is nan" in message
    assert (
        f"repeated from the same state, the loss sum is {healthy.returned[2]}"
        in message
    )
    assert (
        "hardware error likely; the next attempt resumes from the last checkpoint"
        in message
    )
    assert faulty.returned[3] == healthy.returned[2]
    monkeypatch.setattr(loop, "accumulate_gradients", LossSums({}))
    _, code = run_in_process(config_for(tiny_model), environment(workspace))
    assert code == ExitCode.DONE
    assert adapter_digest(workspace) == adapter_digest(workspace, "w" * 16)


def test_step_that_is_not_finite_twice_is_permanent(tiny_model, workspace, monkeypatch):
    monkeypatch.setattr(
        loop, "accumulate_gradients", LossSums({2: math.inf, 3: math.nan})
    )
    message, code = run_to_failure(config_for(tiny_model), environment(workspace))
    assert code == ExitCode.CONFIG
    assert "step 3: the loss sum is inf" in message
    assert "lower train.optimizer.learningRate" in message


@pytest.mark.parametrize(
    ("losses", "code"),
    [([math.nan] * 2, ExitCode.CONFIG), ([math.nan, 2.5], ExitCode.BUG)],
)
def test_non_finite_validation_loss_is_computed_again(
    tiny_model, workspace, monkeypatch, losses, code
):
    monkeypatch.setattr(Validator, "means", lambda *_: {"loss": losses.pop(0)})
    message, exit_code = run_to_failure(config_for(tiny_model), environment(workspace))
    assert "step 4: the validation loss is nan" in message
    assert exit_code == code
    assert losses == []


@pytest.fixture
def train_with(tiny_model, workspace, monkeypatch):
    """A function that trains while every step raises an error; returns the failure's message and the exit code."""

    def train_with(error, **recipe):
        def failing(*_):
            raise error

        monkeypatch.setattr(loop, "accumulate_gradients", failing)
        return run_to_failure(config_for(tiny_model, **recipe), environment(workspace))

    return train_with


@pytest.fixture
def gpu_memory(monkeypatch):
    """A function that simulates a GPU of 140 GiB: GiB that this process has reserved, and GiB that are free."""

    def with_memory(reserved, free):
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda: (int(free * GIB), 140 * GIB)
        )
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: int(reserved * GIB))

    return with_memory


@pytest.mark.parametrize(
    ("recipe", "fix"),
    [
        (
            {"micro_batch_size": 8, "gradient_accumulation_steps": 3},
            "set train.microBatchSize: 4 and train.gradientAccumulationSteps: 6: a step has the same rows",
        ),
        (
            {"micro_batch_size": 9, "gradient_accumulation_steps": 1},
            "set train.microBatchSize: 3 and train.gradientAccumulationSteps: 3",
        ),
        ({"micro_batch_size": 1}, "set train.gradientCheckpointing: true"),
        (
            {"micro_batch_size": 1, "gradient_checkpointing": True},
            "set prepare.contextLength: 512",
        ),
    ],
    ids=str,
)
def test_gpu_out_of_memory_is_permanent_and_names_the_fix(
    train_with, gpu_memory, workspace, recipe, fix
):
    rows = {"context_length": 1024}
    prepare = {
        "identity": PREPARED,
        "model": {"uri": "m"},
        "datasets": [{"uri": "d"}],
        "recipe": rows,
    }
    write_config(
        environment(workspace).stage_dir("prepare", PREPARED),
        PrepareConfig.model_validate(prepare),
    )
    gpu_memory(reserved=132, free=1)
    message, code = train_with(torch.OutOfMemoryError(CUDA_OUT_OF_MEMORY), **recipe)
    assert code == ExitCode.CONFIG
    assert fix in message
    assert (
        "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB"
        in message
    )
    assert "PYTORCH_ALLOC_CONF" not in message


def test_gpu_memory_taken_by_other_processes_is_retried(train_with, gpu_memory):
    gpu_memory(reserved=100, free=1)
    message, code = train_with(torch.OutOfMemoryError(CUDA_OUT_OF_MEMORY))
    assert code == ExitCode.UNAVAILABLE
    assert "other processes use 39.0 of its 140.0 GiB" in message


@pytest.mark.parametrize(
    ("error", "expected", "code"),
    [
        (
            MemoryError(),
            "out of memory (MemoryError): raise train.pod.resources.limits.memory, or set train.microBatch",
            ExitCode.CONFIG,
        ),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried"
            ),
            "raise train.pod.resources.limits.memory",
            ExitCode.CONFIG,
        ),
        (
            RuntimeError(
                "cumsum_cuda_kernel does not have a deterministic implementation, but you set 'torch.use_det"
            ),
            "cumsum_cuda_kernel does not have a deterministic implementation",
            ExitCode.CONFIG,
        ),
        (
            torch.AcceleratorError(
                "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be"
            ),
            "CUDA error: uncorrectable ECC error encountered: the next attempt resumes",
            ExitCode.BUG,
        ),
        (
            RuntimeError("CUDA error: unspecified launch failure"),
            "the GPU failed",
            ExitCode.BUG,
        ),
        (RuntimeError("size mismatch"), "size mismatch", ExitCode.BUG),
    ],
    ids=lambda value: str(value)[:40],
)
def test_error_of_a_step_is_permanent_only_if_deterministic(
    train_with, error, expected, code
):
    message, exit_code = train_with(error)
    assert expected in message
    assert exit_code == code


@pytest.mark.parametrize(
    ("size", "fix"),
    [
        (8, "set evaluate.batchSize: 4, or use a GPU"),
        (None, "set evaluate.batchSize: 1, or use"),
        (1, "memory: use a GPU"),
    ],
)
def test_evaluation_out_of_gpu_memory_names_the_batch_size(tmp_path, size, fix):
    recipe = EvaluateRecipe(tasks=(Task(name="a"),), batch_size=size)
    config = EvaluateConfig(
        identity="e", prepare="p", train="t", model={"uri": "m"}, recipe=recipe
    )
    translated = device_errors.translate(
        torch.OutOfMemoryError(CUDA_OUT_OF_MEMORY), config, environment(tmp_path)
    )
    assert isinstance(translated, ConfigInvalid)
    assert fix in str(translated)


def test_training_is_strictly_deterministic(tiny_model, workspace):
    run_in_process(config_for(tiny_model, max_steps=1), environment(workspace))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.skipif(
    os.environ.get("TRAINING") != "all",
    reason="TRAINING=all runs it: 20 seconds for one message",
)
def test_compile_without_a_compiler_names_the_fix(tiny_model, workspace):
    torch.compiler.reset()
    # Not monkeypatch: it would leave the compiler of later tests without this setting.
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        message, code = run_to_failure(
            config_for(tiny_model, compile=True), environment(workspace)
        )
    assert code == ExitCode.CONFIG
    assert message.startswith(
        "train.compile needs a C compiler, and this image has none: set train.pod.image"
    )
