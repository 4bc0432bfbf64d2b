"""Several processes that train together: equal to one process, and exact however one of them is killed."""

import math
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.trainer.rank_trainings import DPO, METHODS, PLAIN, PROCESSES, STEPS
from support.trainer.training import (
    STEPS_OF_KILLED,
    documents,
    random_kills,
    stage_folder,
    stop_code,
    write_rows,
)

from finetune_trainer.contract import ExitCode, Samples
from finetune_trainer.contract.sample_rows import SAMPLES, read_samples
from finetune_trainer.data.packing.row_format import record_size
from finetune_trainer.data.packing.rows import PackedRows
from finetune_trainer.training.batches import StepSampler

ALL = os.environ.get("TRAINING") == "all"
"""Whether to run what takes minutes."""


@pytest.fixture(scope="module")
def one_process(new_training):
    return new_training(gradient_accumulation_steps=4, **PLAIN).run()


TWO = {"processes_per_node": 2, "gradient_accumulation_steps": 2}
FOUR = {"processes_per_node": 4, "gradient_accumulation_steps": 1}
SEVERAL: dict[str, dict[str, Any]] = {
    "2": TWO,
    "4": FOUR,
    "2x2": {"nodes": 2, "processes_per_node": 2, "gradient_accumulation_steps": 1},
    "2 sharded": TWO | {"parallelism": "FSDP"},
}
if ALL:
    SEVERAL["4 sharded"] = FOUR | {"parallelism": "FSDP"}


@pytest.mark.parametrize("processes", SEVERAL.values(), ids=SEVERAL)
def test_losses_of_several_processes_equal_those_of_one(
    new_training, one_process, processes
):
    several = new_training(**PLAIN, **processes).run()
    assert several.losses == pytest.approx(one_process.losses, abs=1e-6)
    assert len(several.losses) == STEPS
    assert several.message.result.validation_loss == pytest.approx(
        one_process.message.result.validation_loss, abs=1e-6
    )
    assert several.message.result.tokens == one_process.message.result.tokens


FULL: dict[str, Any] = {"method": "Full", "lora": None}


@pytest.mark.parametrize("recipe", [FULL, PLAIN | {"method": "QLoRA"}], ids=str)
def test_losses_of_other_methods_equal_those_of_one_process(new_training, recipe):
    alone = new_training(gradient_accumulation_steps=2, **recipe).run()
    together = new_training(
        gradient_accumulation_steps=1, processes_per_node=2, **recipe
    ).run()
    assert together.losses == pytest.approx(alone.losses, abs=1e-6)
    assert together.message.result.validation_loss == pytest.approx(
        alone.message.result.validation_loss, abs=1e-6
    )


@pytest.mark.parametrize("parallelism", ["DDP", "FSDP"])
def test_preference_losses_of_two_processes_equal_those_of_one(
    new_training, parallelism
):
    """The reference's parts have two rows, so that both processes compute some."""
    options = {
        "constants": {"finetune_trainer.training.objectives.reference.PART_ROWS": 2}
    }
    alone = new_training(gradient_accumulation_steps=2, **DPO, **PLAIN).run()
    together = new_training(
        options,
        gradient_accumulation_steps=1,
        processes_per_node=2,
        parallelism=parallelism,
        **DPO,
        **PLAIN,
    ).run()
    assert together.losses == pytest.approx(alone.losses, abs=1e-6)
    assert together.losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert together.losses[-1] < 0.69
    assert together.message.result.validation_loss == pytest.approx(
        alone.message.result.validation_loss, abs=1e-6
    )


SHARDED = [FULL]
if ALL:
    SHARDED += [{"lora": {"rank": 4, "alpha": 8}, "dtype": "BF16"}]
    SHARDED += [FULL | {"gradient_checkpointing": True}, FULL | {"dtype": "BF16"}]
    SHARDED += [
        {"lora": {"rank": 4, "variant": "DoRA"}},
        {"lora": {"rank": 4, "modules_to_save": ["lm_head"]}},
    ]


@pytest.mark.parametrize("recipe", SHARDED, ids=str)
def test_sharded_model_is_trained_as_whole_ones_are(new_training, recipe):
    """All weights are trained, tied ones too, or an adapter in fp32 beside weights in bf16.

    The logits are computed for one target at a time.
    """
    common = {"optimizer": {"learning_rate": 1e-3}} | recipe
    options = {
        "constants": {"finetune_trainer.training.model.loss.CHUNK_BYTES": 4 * 320}
    }
    whole = new_training(options, processes_per_node=2, **common).run()
    sharded = new_training(
        options, processes_per_node=2, parallelism="FSDP", **common
    ).run()
    assert sharded.losses == pytest.approx(
        whole.losses, abs=1e-3 if recipe.get("dtype") else 1e-6
    )
    files = [
        next((stage_folder(training.workspace) / "output").glob("*.safetensors"))
        for training in (whole, sharded)
    ]
    expected, trained = map(load_file, files)
    assert trained.keys() == expected.keys()
    assert (
        max(float((trained[name] - expected[name]).abs().max()) for name in trained)
        < 1e-3
    )


RUNS = [("LoRA", 2), ("Full, sharded", 2)]
if ALL:
    RUNS = [(method, processes) for processes in (2, 4) for method in METHODS]


@pytest.fixture(scope="module", params=RUNS, ids=lambda run: f"{run[0]}-{run[1]}")
def several(request, new_training):
    """The recipe of several processes, and the digest of their weights after a training without kills."""
    method, processes = request.param
    recipe = METHODS[method] | {
        "processes_per_node": processes,
        "gradient_accumulation_steps": 2,
    }
    recipe |= {"max_steps": STEPS_OF_KILLED}
    return recipe, new_training(**recipe).run().digest


def test_kills_of_any_process_do_not_change_the_weights(new_training, several):
    recipe, uninterrupted = several
    training = new_training(**recipe)
    for rank, after, number in random_kills(
        range(recipe["processes_per_node"]), longest_delay=0.1
    ):
        process = training.start()
        process.until(lambda: training.step() > 0)
        time.sleep(after)
        os.kill([process.pid, *process.other_ranks()][rank], number)
        # A lost process is a failure of its pod; all others are interruptions.
        lost = rank > 0 and number == signal.SIGKILL
        assert process.wait() == (
            ExitCode.UNAVAILABLE if lost else stop_code(number)
        ), training.log
    assert training.run().digest == uninterrupted
    assert "corrupt" not in training.log


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_one_process_saves_the_step_and_ends_all(new_training, rank):
    training = new_training(
        processes_per_node=2, max_steps=400, checkpoint={"every_steps": 1000}
    )
    process = training.start()
    process.until(lambda: training.step() > 5)
    pids = [process.pid, *process.other_ranks()]
    os.kill(pids[rank], signal.SIGTERM)
    assert process.wait() == ExitCode.INTERRUPTED
    interruption = training.message.interruption
    assert interruption.step == interruption.saved_step > 5
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids[1:])


def test_killed_process_costs_no_finished_step(new_training):
    training = new_training(
        processes_per_node=2, max_steps=400, checkpoint={"every_steps": 1000}
    )
    process = training.start()
    process.until(lambda: training.step() > 5)
    os.kill(process.other_ranks()[0], signal.SIGKILL)
    assert process.wait() == ExitCode.UNAVAILABLE
    assert "process 1 of 2 was killed by SIGKILL" in training.message.failure.message
    (folder,) = (stage_folder(training.workspace) / "checkpoints").glob("step-*")
    assert int(folder.name.removeprefix("step-")) >= training.step() > 5


def test_frozen_process_is_given_up_after_sigterm(new_training):
    options = {
        "constants": {
            "finetune_trainer.training.distributed.ranks.ABANDON_SECONDS": 0.5
        }
    }
    training = new_training(
        options, processes_per_node=2, max_steps=400, checkpoint={"every_steps": 1000}
    )
    process = training.start()
    process.until(lambda: training.step() > 5)
    os.kill(process.other_ranks()[0], signal.SIGSTOP)
    process.kill(signal.SIGTERM)
    assert process.wait() == ExitCode.INTERRUPTED
    interruption = training.message.interruption
    assert interruption.step == interruption.saved_step > 5


SHARDED_PAIR = {"processes_per_node": 2, "parallelism": "FSDP", "max_steps": 400}
SOON_ENDED: dict[str, Any] = {
    "constants": {f"{PROCESSES}.HANG_SECONDS": 0.1, f"{PROCESSES}.WATCH_SECONDS": 0.05},
    "slow_disk": 0.3,
}
"""A process that waits for a lost one is ended long before it could write a checkpoint."""


def test_sharded_checkpoint_is_written_after_the_others_end(new_training):
    """They end after the weights are gathered. A process that waits for one of them is ended; this one only writes."""
    training = new_training(
        SOON_ENDED, **SHARDED_PAIR, checkpoint={"every_steps": 1000}
    )
    process = training.start()
    process.until(lambda: training.step() > 5)
    process.kill(signal.SIGTERM)
    assert process.wait() == ExitCode.INTERRUPTED
    interruption = training.message.interruption
    assert interruption.step == interruption.saved_step > 5


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_end_of_a_process_leaves_the_sharded_write_whole(new_training, number):
    # The first process is then nearly always in a sum, where it finds that another one is lost.
    constants = SOON_ENDED["constants"] | {
        "finetune_trainer.training.distributed.ranks.POLL_SECONDS": 0.05
    }
    training = new_training(
        SOON_ENDED | {"constants": constants},
        **SHARDED_PAIR,
        checkpoint={"every_steps": 5},
    )
    checkpoints = stage_folder(training.workspace) / "checkpoints"
    process = training.start()
    process.until(lambda: list(checkpoints.glob(".step-*")))
    os.kill(process.other_ranks()[0], number)
    assert process.wait() == (
        ExitCode.UNAVAILABLE if number == signal.SIGKILL else ExitCode.INTERRUPTED
    )
    steps = sorted(
        int(folder.name.removeprefix("step-")) for folder in checkpoints.glob("step-*")
    )
    assert steps[0] == 5
    if number == signal.SIGTERM:
        interruption = training.message.interruption
        assert interruption.step == interruption.saved_step == steps[-1] >= 5


def test_samples_of_a_sharded_model_do_not_change_the_adapter(new_training):
    recipe = SHARDED_PAIR | {"max_steps": 8, "eval_steps": 4}
    plain = new_training(**recipe).run()
    sampling = new_training(**recipe)
    samples = Samples(prompts=("A reader opens",), max_new_tokens=4)
    sampling.config = sampling.config.model_copy(update={"samples": samples})
    assert sampling.run().digest == plain.digest
    assert [
        row.step for row in read_samples(stage_folder(sampling.workspace) / SAMPLES)
    ] == [0, 4, 8]


def test_failure_of_another_process_is_that_of_the_stage(new_training):
    training = new_training(
        processes_per_node=2, gradient_accumulation_steps=1, max_steps=4
    )
    (training.workspace / "prepare").unlink()
    path = write_rows(training.workspace, documents(60)) / "train-00000.rows"
    recipe = training.config.recipe
    rows = PackedRows(path.parent, "train")
    # The first step's second micro-batch belongs to process 1.
    number = StepSampler.of(recipe, len(rows), training.config.seed).rows_for_step(0)[
        recipe.micro_batch_size
    ]
    content = bytearray(path.read_bytes())
    content[int(number) * record_size(rows.context_length)] ^= 1
    path.write_bytes(content)
    assert training.start().wait() == ExitCode.DATA
    assert (
        f"process 1 of 2: the packed rows are corrupt: output/{path.name}: row {number}"
        in training.message.failure.message
    )


def test_other_processes_write_nothing_to_the_workspace(new_training):
    alone = new_training(gradient_accumulation_steps=2).run()
    together = new_training(processes_per_node=2).run()

    def files(training):
        paths = (
            path.relative_to(training.workspace)
            for path in training.workspace.rglob("*")
        )
        return {re.sub(r"step-[0-9]+", "step", str(path)) for path in paths}

    assert files(together) == files(alone)
