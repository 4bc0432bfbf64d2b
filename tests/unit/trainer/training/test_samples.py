"""Texts that training generates at validations: the adapter is the same, and each step has each prompt once."""

import errno
import json
import os
import random
import re
import shutil
import signal
import time

import pytest
from support.trainer.training import (
    adapter_digest,
    documents,
    environment,
    run_train,
    stage_folder,
    train_config,
    write_rows,
)
from transformers import AutoTokenizer

from finetune_trainer.contract import ExitCode, PrepareResult, Samples
from finetune_trainer.contract.sample_rows import (
    SAMPLES,
    SampleRow,
    parse_samples,
    read_samples,
)
from finetune_trainer.runtime.stage_folder import write_result
from finetune_trainer.tracking.samples_file import SamplesFile

STEPS = 24
PROMPTS = ("A reader opens", "The parser\nreturns", "ß\u2028?")
VALIDATED = [7, 14, 21, 24]
SAMPLED = [0, *VALIDATED]
"""Before the first step, too."""


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    workspace = tmp_path_factory.mktemp("packed")
    write_rows(workspace, documents(60), documents(8, seed=5))
    return workspace


@pytest.fixture
def workspace(packed, tmp_path):
    shutil.copytree(packed / "prepare", tmp_path / "workspace" / "prepare")
    return tmp_path / "workspace"


@pytest.fixture(scope="module")
def plain(tiny_model):
    """The config without samples; it has dropout."""
    return train_config(
        tiny_model, max_steps=STEPS, eval_steps=7, checkpoint={"every_steps": 3}
    )


@pytest.fixture(scope="module")
def config(plain):
    return plain.model_copy(
        update={"samples": Samples(prompts=PROMPTS, max_new_tokens=6)}
    )


@pytest.fixture(scope="module")
def undisturbed(fork_server, packed, plain, config):
    """A workspace with a training with samples, and the digest of the adapter of one without."""
    assert (
        fork_server.start(config, environment(packed), packed / "log").wait()
        == ExitCode.DONE
    )
    other = plain.model_copy(update={"identity": "w" * 16})
    assert (
        fork_server.start(other, environment(packed), packed / "log").wait()
        == ExitCode.DONE
    )
    return packed, adapter_digest(packed, "w" * 16)


def rows_of(workspace):
    return [
        (row.step, row.prompt)
        for row in read_samples(stage_folder(workspace) / SAMPLES)
    ]


def lines_of(workspace):
    return (
        (stage_folder(workspace) / SAMPLES).read_text().removesuffix("\n").split("\n")
    )


def test_samples_of_every_validation_do_not_change_the_adapter(undisturbed):
    workspace, without = undisturbed
    assert adapter_digest(workspace) == without
    assert rows_of(workspace) == [
        (step, prompt) for step in SAMPLED for prompt in PROMPTS
    ]
    assert all(row.text for row in read_samples(stage_folder(workspace) / SAMPLES))
    assert not (stage_folder(workspace, "w" * 16) / SAMPLES).exists()


@pytest.mark.parametrize("seed", [1, 2])
def test_kills_leave_the_same_adapter_and_each_sample_once(
    fork_server, config, undisturbed, workspace, seed
):
    generator = random.Random(seed)
    codes = []
    # The first two before the first step, and the others at validations.
    for attempt, number in enumerate(
        (
            signal.SIGKILL,
            signal.SIGTERM,
            signal.SIGKILL,
            signal.SIGTERM,
            signal.SIGKILL,
            signal.SIGTERM,
        )
    ):
        (workspace / "progress.json").unlink(missing_ok=True)
        process = fork_server.start(
            config, environment(workspace), workspace / "log", slow_disk=0.01
        )
        reached = process.until(
            lambda first=attempt < 2: is_sampling(workspace, first=first)
        )
        if reached:
            time.sleep(generator.uniform(0, 0.06))
            process.kill(number)
        codes.append(process.wait())
    process = fork_server.start(config, environment(workspace), workspace / "log")
    assert process.wait() == ExitCode.DONE, (workspace / "log").read_text()
    assert {ExitCode.INTERRUPTED, -signal.SIGKILL} <= set(codes), codes
    first, without = undisturbed
    assert adapter_digest(workspace) == without
    assert lines_of(workspace) == lines_of(first)


def is_sampling(workspace, *, first):
    """Return whether a process generates samples, before the first step or at a validation."""
    try:
        progress = json.loads((workspace / "progress.json").read_text())
    except (OSError, ValueError):
        return False
    is_first = progress["step"] == 0
    return progress.get("note") == "generating samples" and is_first == first


def test_failing_generation_is_logged_once_and_training_goes_on(
    config, undisturbed, workspace, monkeypatch, capsys
):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr("peft.PeftModelForCausalLM.generate", fail)
    assert run_train(config, workspace).steps == STEPS
    assert adapter_digest(workspace) == undisturbed[1]
    assert rows_of(workspace) == []
    assert capsys.readouterr().out.count("train: no samples: no kernel for this") == 1


def test_samples_end_at_the_last_position_of_the_model(
    config, undisturbed, workspace, tiny_model
):
    """A position that the model does not have would end the use of a GPU by the process, and so the training."""
    positions = json.loads((tiny_model / "config.json").read_text())[
        "max_position_embeddings"
    ]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    texts = ("w " * count for count in range(1, 2 * positions))
    prompt = next(
        text
        for text in texts
        if positions - 4 <= len(tokenizer(text)["input_ids"]) < positions
    )
    samples = Samples(prompts=(prompt,), max_new_tokens=6)
    run_train(config.model_copy(update={"samples": samples}), workspace)
    assert adapter_digest(workspace) == undisturbed[1]
    assert [
        row.step for row in read_samples(stage_folder(workspace) / SAMPLES)
    ] == SAMPLED


def test_prompt_that_is_too_long_ends_the_samples_only(
    config, undisturbed, workspace, capsys
):
    samples = Samples(prompts=("w " * 2000,), max_new_tokens=6)
    assert (
        run_train(config.model_copy(update={"samples": samples}), workspace).steps
        == STEPS
    )
    assert adapter_digest(workspace) == undisturbed[1]
    message = r"no samples: the prompt 'w w.*' has \d+ tokens, and the model 512 positions: shorten it"
    assert re.search(message, capsys.readouterr().out)


def test_prompts_are_conversations_where_the_records_are(
    config, packed, workspace, tiny_model, monkeypatch
):
    """The tiny model has no chat template, so that the default one shows."""
    seen = []
    folder = workspace / "prepare" / config.prepare
    write_result(
        folder,
        PrepareResult(
            identity=config.prepare, digest="sha256:x", records=1, invalid=0, truncated=0, dropped=0, train_rows=1,
            validation_rows=1, train_tokens=1, data_digest="sha256:y", conversations=True,
        ),
    )  # fmt: skip
    from finetune_trainer.training import samples  # noqa: PLC0415  imports torch

    encoded = samples.SampleGenerator._encoded

    def record(self, prompt):
        seen.append(self._tokenizer.decode(encoded(self, prompt)))
        return encoded(self, prompt)

    monkeypatch.setattr(samples.SampleGenerator, "_encoded", record)
    run_train(
        config.model_copy(
            update={"samples": Samples(prompts=("Hi",), max_new_tokens=2)}
        ),
        workspace,
    )
    assert seen == ["user: Hi\n\nassistant:"]
    assert rows_of(workspace) == [(step, "Hi") for step in SAMPLED]


def test_prompts_have_the_template_of_prepare(tiny_model):
    from finetune_trainer.training.samples import SampleGenerator  # noqa: PLC0415  imports torch

    generator = SampleGenerator(
        Samples(prompts=("Hi",), max_new_tokens=2),
        tiny_model,
        conversations=True,
        chat_templates={"default": "[{{ messages[0].content }}]"},
    )
    [tokens] = generator._prompts.values()
    assert generator._tokenizer.decode(tokens) == "[Hi]"


def test_samples_after_the_resumed_step_are_replaced(tmp_path, capsys):
    """On another machine the repeated step may have another text."""
    path = tmp_path / SAMPLES
    for last, text in ((0, "first"), (7, "second")):
        file = SamplesFile(path)
        file.open(last)
        assert {row.step for row in read_samples(path)} == {7} & {last}
        file.record(
            SampleRow(step, prompt, text) for step in (7, 14) for prompt in ("a", "b")
        )
        file.sync()
    rows = [(row.step, row.prompt, row.text) for row in read_samples(path)]
    assert rows == [
        (7, "a", "first"),
        (7, "b", "first"),
        (14, "a", "second"),
        (14, "b", "second"),
    ]
    assert len(path.read_text().splitlines()) == 4
    assert (
        'sample {"step": 14, "prompt": "b", "text": "second"}\n'
        in capsys.readouterr().out
    )


def test_samples_are_appended_again_after_a_full_disk(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    file = SamplesFile(tmp_path / SAMPLES)
    file.open(0)
    file.record([SampleRow(1, "a", "first")])
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        file.sync()
    file.record([SampleRow(2, "a", "only in the log")])
    file.try_again()
    file.record([SampleRow(3, "a", "third")])
    assert [row.step for row in read_samples(tmp_path / SAMPLES)] == [1, 3]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"step": "x", "prompt": "a", "text": "b"}',
        '{"step": 1, ',
    ],
)
def test_line_that_is_no_sample_is_left_out(line):
    assert parse_samples([line, '{"step": 2, "prompt": "a", "text": "b"}', line]) == [
        SampleRow(2, "a", "b")
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "BF16"},
        {"gradient_checkpointing": True},
        {"lora": {"variant": "DoRA"}},
    ],
)
def test_samples_do_not_change_the_adapter_of_other_recipes(
    workspace, tiny_model, changes
):
    plain = train_config(tiny_model, max_steps=4, eval_steps=2, **changes)
    sampling = plain.model_copy(
        update={
            "identity": "s" * 16,
            "samples": Samples(prompts=PROMPTS, max_new_tokens=4),
        }
    )
    for config in (plain, sampling):
        run_train(config, workspace)
    assert len(read_samples(stage_folder(workspace, "s" * 16) / SAMPLES)) == 3 * len(
        PROMPTS
    )
    assert adapter_digest(workspace) == adapter_digest(workspace, "s" * 16)
