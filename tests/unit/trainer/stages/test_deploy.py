import http.client
import json
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.servers import fake_engine
from support.trainer.stages import (
    environment_in,
    read_termination_message,
    run_in_process,
    start_stage,
)

from finetune_trainer.contract import (
    DeployConfig,
    DeployRecipe,
    DeployResult,
    Environment,
    ExitCode,
    ModelSource,
    SmokeTest,
    TerminationMessage,
)
from finetune_trainer.contract.engines import ENGINES
from finetune_trainer.runtime.artifacts import seal, verify
from finetune_trainer.runtime.stage_folder import write_termination_message
from finetune_trainer.stages.deploy import truncate_answer
from finetune_trainer.stop_signal import stop


@pytest.fixture
def environment(tmp_path: Path, tiny_model: Path) -> Environment:
    """A pushed model, in a folder whose name `transformers serve` would parse as NAME@REVISION."""
    from shutil import copytree  # noqa: PLC0415

    environment = environment_in(tmp_path)
    copytree(tiny_model, tmp_path / "manifest" / "names@v1")
    seal(tmp_path / "manifest" / "names@v1", {"stage": "push"})
    return environment


@pytest.fixture
def config() -> DeployConfig:
    recipe = DeployRecipe(smoke_test=SmokeTest(prompt="The parser", max_tokens=4))
    return DeployConfig(
        identity="s1", push="p1", model=ModelSource(uri="names@v1"), recipe=recipe
    )


@pytest.fixture
def stop_requested_soon() -> Iterator[None]:
    """Request a stop half a second from now, as SIGTERM does."""
    timer = threading.Timer(0.5, lambda: setattr(stop, "requested", True))
    timer.start()
    yield
    timer.cancel()
    stop.requested = False


def is_served(url: str) -> bool:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=2)
    try:
        connection.request("GET", "/health")
    except OSError:
        return False
    else:
        return connection.getresponse().status == 200


def children_of(pid: int) -> list[int]:
    return [
        int(child)
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ]


def arguments_of(pid: int) -> list[bytes]:
    """Return the command line of a process, without arguments while the kernel is replacing its program."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def is_alive(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except OSError:
        return False


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, (
            f"the condition was not met within {seconds} s"
        )
        time.sleep(0.02)


def greedy_completion(folder: Path, prompt: str, tokens: int) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = AutoModelForCausalLM.from_pretrained(folder).generate(
        **inputs, max_new_tokens=tokens, do_sample=False
    )
    text: str = tokenizer.decode(
        output[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return text


def test_pushed_model_answers_and_its_server_is_stopped(
    environment: Environment, config: DeployConfig, tmp_path: Path
) -> None:
    message, code = run_in_process(config, environment)
    assert code == ExitCode.DONE, message.failure
    result = message.result
    assert isinstance(result, DeployResult)
    assert result.answer == greedy_completion(
        tmp_path / "manifest" / "names@v1", "The parser", 4
    )
    assert result.seconds_to_ready > 0
    assert not is_served(result.url)
    folder = environment.stage_dir("deploy", "s1")
    verify(folder / "output")
    assert (
        json.loads((folder / "output" / "answer.json").read_text())["prompt"]
        == "The parser"
    )
    assert (
        run_in_process(config, environment)[0].result == result
    )  # reused, without starting a server


@pytest.fixture
def restored_signal_handlers() -> Iterator[None]:
    before = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    stop.requested = False


@pytest.mark.usefixtures("restored_signal_handlers")
@pytest.mark.parametrize("behavior", ["answers", "never ready"])
def test_interrupted_foreground_server_exits_with_0(
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    behavior: str,
) -> None:
    monkeypatch.setitem(ENGINES, "Transformers", fake_engine(behavior))
    monkeypatch.setattr(sys, "argv", ["serving", str(tiny_model)])
    before = children_of(os.getpid())
    threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_module("finetune_trainer.serving", run_name="__main__")
    assert exit_info.value.code == 0
    assert children_of(os.getpid()) == before
    output = capfd.readouterr().out
    assert (f"serving {tiny_model.name} at http://127.0.0.1:" in output) == (
        behavior == "answers"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_server_ends_with_its_stage(
    environment: Environment, config: DeployConfig, number: int
) -> None:
    process = start_stage(config, environment)
    wait_until(lambda: process.poll() is not None or children_of(process.pid))
    (server,) = children_of(process.pid)
    if (
        number == signal.SIGKILL
    ):  # parent_death.py must have called prctl, so wait until it runs the command
        wait_until(
            lambda: any(
                b"transformers" in argument for argument in arguments_of(server)[3:4]
            )
        )
    process.send_signal(number)  # only to the stage, not to its process group
    code = process.wait(20)
    wait_until(lambda: not is_alive(server), seconds=10)
    if number == signal.SIGTERM:
        assert code == ExitCode.INTERRUPTED
        assert read_termination_message(environment).interruption


@pytest.mark.parametrize(
    ("behavior", "expected"),
    [
        ("exits", "the weights cannot be loaded"),
        ("rejects", "unknown model"),
        ("lists another model", "GET /v1/models answered"),
        ("never ready", "not ready within"),
    ],
)
def test_failure_of_the_server_is_reported_with_its_output(
    environment: Environment,
    config: DeployConfig,
    monkeypatch: pytest.MonkeyPatch,
    behavior: str,
    expected: str,
) -> None:
    monkeypatch.setitem(ENGINES, "Transformers", fake_engine(behavior))
    timeout = 0.5 if behavior == "never ready" else 5.0
    monkeypatch.setattr(
        "finetune_trainer.serving.server.READY_TIMEOUT_SECONDS", timeout
    )
    message, code = run_in_process(config, environment)
    assert message.failure
    assert expected in message.failure.message
    assert code == ExitCode.UNAVAILABLE


@pytest.mark.usefixtures("stop_requested_soon")
@pytest.mark.parametrize("behavior", ["never ready", "hangs"])
def test_stage_waiting_for_its_server_stops_on_request(
    environment: Environment,
    config: DeployConfig,
    monkeypatch: pytest.MonkeyPatch,
    behavior: str,
) -> None:
    monkeypatch.setitem(ENGINES, "Transformers", fake_engine(behavior))
    started = time.monotonic()
    message, code = run_in_process(config, environment)
    assert code == ExitCode.INTERRUPTED
    assert message.interruption
    assert time.monotonic() - started < 10


def test_server_that_ignores_sigterm_is_killed(
    environment: Environment, config: DeployConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENGINES, "Transformers", fake_engine("ignores SIGTERM"))
    monkeypatch.setattr("finetune_trainer.serving.server.STOP_TIMEOUT_SECONDS", 0.2)
    message, code = run_in_process(config, environment)
    assert code == ExitCode.DONE
    assert isinstance(message.result, DeployResult)
    assert not is_served(message.result.url)


def test_long_answer_is_truncated(
    environment: Environment, config: DeployConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENGINES, "Transformers", fake_engine("answers"))
    long = config.model_copy(
        update={
            "recipe": DeployRecipe(
                smoke_test=SmokeTest(prompt="The parser", max_tokens=4096)
            )
        }
    )
    message, _ = run_in_process(long, environment)
    assert isinstance(message.result, DeployResult)
    assert len(message.result.answer) == 1024
    assert message.result.answer.startswith(" after The parser")


def answered(
    config: DeployConfig,
    environment: Environment,
    monkeypatch: pytest.MonkeyPatch,
    behavior: str,
    *,
    conversations: bool = False,
    **test: Any,
) -> tuple[TerminationMessage, ExitCode]:
    """Run the stage with a fake server that behaves as named."""
    monkeypatch.setitem(ENGINES, "Transformers", fake_engine(behavior))
    smoke_test = SmokeTest(prompt="Is it?", max_tokens=1, **test)
    recipe = DeployRecipe(smoke_test=smoke_test)
    changes = {"recipe": recipe, "conversations": conversations}
    return run_in_process(config.model_copy(update=changes), environment)


@pytest.mark.parametrize(
    ("conversations", "behavior", "answer"),
    [
        (False, "answers", " after Is it?"),
        (True, "answers", "said after Is it?"),
        (True, "thinks", "it is"),
    ],
)
def test_prompt_is_a_message_if_records_are_conversations(
    environment: Environment,
    config: DeployConfig,
    monkeypatch: pytest.MonkeyPatch,
    behavior: str,
    answer: str,
    *,
    conversations: bool,
) -> None:
    message, _ = answered(
        config, environment, monkeypatch, behavior, conversations=conversations
    )
    assert isinstance(message.result, DeployResult)
    assert message.result.answer == answer


@pytest.mark.parametrize(
    ("behavior", "expect", "problem"),
    [
        ("is empty", None, "the model answered 'Is it?' with no text"),
        ("answers", "AFTER", "' after Is it?' does not contain 'AFTER'"),
        ("answers", "after Is", ""),
    ],
)
def test_answer_that_proves_nothing_fails_the_stage_for_good(
    environment: Environment,
    config: DeployConfig,
    monkeypatch: pytest.MonkeyPatch,
    behavior: str,
    expect: str | None,
    *,
    problem: str,
) -> None:
    message, code = answered(config, environment, monkeypatch, behavior, expect=expect)
    if problem:
        assert message.failure
        assert problem in message.failure.message
    assert code == (ExitCode.CONFIG if problem else ExitCode.DONE)


@pytest.mark.parametrize("character", ["a", "字", "🙂", "\x00"])
def test_answer_of_any_characters_fits_the_termination_message(
    tmp_path: Path, character: str
) -> None:
    environment = Environment(tmp_path, termination_log=tmp_path / "log")
    result = DeployResult(
        identity="d" * 16,
        digest="sha256:0",
        url="",
        answer=truncate_answer(character * 4096),
        seconds_to_ready=1.0,
    )
    write_termination_message(environment, TerminationMessage(result=result))
    assert environment.termination_log.stat().st_size <= 4096
    assert character in result.answer


def test_corrupt_model_is_not_served(
    environment: Environment, config: DeployConfig, tmp_path: Path
) -> None:
    weights = tmp_path / "manifest" / "names@v1" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    message, code = run_in_process(config, environment)
    assert message.failure
    assert "model.safetensors" in message.failure.message
    assert code == ExitCode.NOT_FOUND
