import http.client
import json
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.servers import server_that
from support.stages import environment_in, message_in, run_here, start

from finetune_trainer.contract import (
    DeployConfig,
    DeployRecipe,
    DeployResult,
    Environment,
    ExitCode,
    ModelSource,
    TerminationMessage,
)
from finetune_trainer.contract.engines import ENGINES
from finetune_trainer.runtime.artifacts import seal, verify
from finetune_trainer.runtime.stage_folder import write_termination_message
from finetune_trainer.stages.deploy import truncate_answer
from finetune_trainer.stop_signal import stop


@pytest.fixture
def environment(tmp_path: Path, tiny_model: Path) -> Environment:
    """A pushed model, under a name that `transformers serve` would take apart at the @."""
    from shutil import copytree  # noqa: PLC0415

    here = environment_in(tmp_path)
    copytree(tiny_model, tmp_path / "manifest" / "names@v1")
    seal(tmp_path / "manifest" / "names@v1", {"stage": "push"})
    return here


@pytest.fixture
def config() -> DeployConfig:
    recipe = DeployRecipe(prompt="The parser", max_tokens=4)
    return DeployConfig(identity="s1", push="p1", model=ModelSource(uri="names@v1"), recipe=recipe)


@pytest.fixture
def asked_to_stop() -> Iterator[None]:
    """SIGTERM half a second from now."""
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
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(moment: object, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not moment():  # type: ignore[operator]  # a function without arguments
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.02)


def greedy_words(folder: Path, prompt: str, tokens: int) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    said = AutoModelForCausalLM.from_pretrained(folder).generate(**inputs, max_new_tokens=tokens, do_sample=False)
    text: str = tokenizer.decode(said[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def test_the_pushed_model_answers_and_its_server_is_gone_afterwards(
    environment: Environment, config: DeployConfig, tmp_path: Path
) -> None:
    message, code = run_here(config, environment)
    assert code == ExitCode.DONE, message.failure
    result = message.result
    assert isinstance(result, DeployResult)
    assert result.answer == greedy_words(tmp_path / "manifest" / "names@v1", "The parser", 4)
    assert result.seconds_to_ready > 0
    assert not is_served(result.url)
    folder = environment.stage_dir("deploy", "s1")
    verify(folder / "output")
    assert json.loads((folder / "output" / "answer.json").read_text())["prompt"] == "The parser"
    assert run_here(config, environment)[0].result == result  # as it was, without a server


@pytest.fixture
def signals_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    stop.requested = False


@pytest.mark.usefixtures("signals_as_before")
@pytest.mark.parametrize("manner", ["answers", "loads"])
def test_serving_in_the_foreground_ends_well_when_it_is_interrupted(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], manner: str
) -> None:
    monkeypatch.setitem(ENGINES, "transformers", server_that(manner))
    monkeypatch.setattr(sys, "argv", ["serving", str(tiny_model)])
    before = children_of(os.getpid())
    threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("finetune_trainer.serving", run_name="__main__")
    assert ended.value.code == 0
    assert children_of(os.getpid()) == before
    said = capfd.readouterr().out
    assert (f"serving {tiny_model.name} at http://127.0.0.1:" in said) == (manner == "answers")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_server_outlives_a_stage_that_was_ended(environment: Environment, config: DeployConfig, number: int) -> None:
    process = start(config, environment)
    until(lambda: process.poll() is not None or children_of(process.pid))
    (server,) = children_of(process.pid)
    if number == signal.SIGKILL:  # what asks the kernel for the end is the child itself, in its first lines
        until(lambda: b"transformers" in Path(f"/proc/{server}/cmdline").read_bytes().split(b"\0")[3:4][0])
    process.send_signal(number)  # to the stage alone
    code = process.wait(20)
    until(lambda: not is_alive(server), seconds=10)
    if number == signal.SIGTERM:
        assert code == ExitCode.INTERRUPTED
        assert message_in(environment).interruption


@pytest.mark.parametrize(
    ("manner", "words"),
    [
        ("dies", "the weights are made of stone"),
        ("refuses", "no such words"),
        ("loads", "not ready within"),
    ],
)
def test_a_server_that_fails_is_said_with_its_own_words(
    environment: Environment, config: DeployConfig, monkeypatch: pytest.MonkeyPatch, manner: str, words: str
) -> None:
    monkeypatch.setitem(ENGINES, "transformers", server_that(manner))
    monkeypatch.setattr("finetune_trainer.serving.server.READY_TIMEOUT_SECONDS", 5.0 if manner != "loads" else 0.5)
    message, code = run_here(config, environment)
    assert message.failure
    assert words in message.failure.message
    assert code == ExitCode.UNAVAILABLE


@pytest.mark.usefixtures("asked_to_stop")
@pytest.mark.parametrize("manner", ["loads", "ponders"])
def test_a_stage_that_waits_for_its_server_stops_when_asked(
    environment: Environment, config: DeployConfig, monkeypatch: pytest.MonkeyPatch, manner: str
) -> None:
    monkeypatch.setitem(ENGINES, "transformers", server_that(manner))
    began = time.monotonic()
    message, code = run_here(config, environment)
    assert code == ExitCode.INTERRUPTED
    assert message.interruption
    assert time.monotonic() - began < 10


def test_a_server_that_clings_to_its_life_is_killed(
    environment: Environment, config: DeployConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENGINES, "transformers", server_that("clings"))
    monkeypatch.setattr("finetune_trainer.serving.server.STOP_TIMEOUT_SECONDS", 0.2)
    message, code = run_here(config, environment)
    assert code == ExitCode.DONE
    assert isinstance(message.result, DeployResult)
    assert not is_served(message.result.url)


def test_a_long_answer_is_cut(environment: Environment, config: DeployConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "transformers", server_that("answers"))
    long = config.model_copy(update={"recipe": DeployRecipe(prompt="The parser", max_tokens=4096)})
    message, _ = run_here(long, environment)
    assert isinstance(message.result, DeployResult)
    assert len(message.result.answer) == 1024
    assert message.result.answer.startswith(" after The parser")


@pytest.mark.parametrize("character", ["a", "字", "🙂", "\x00"])
def test_an_answer_of_any_characters_fits_into_a_termination_message(tmp_path: Path, character: str) -> None:
    environment = Environment(tmp_path, termination_log=tmp_path / "log")
    result = DeployResult(
        identity="d" * 16, digest="sha256:0", url="", answer=truncate_answer(character * 4096), seconds_to_ready=1.0
    )
    write_termination_message(environment, TerminationMessage(result=result))
    assert environment.termination_log.stat().st_size <= 4096
    assert character in result.answer


def test_a_damaged_model_is_not_served(environment: Environment, config: DeployConfig, tmp_path: Path) -> None:
    weights = tmp_path / "manifest" / "names@v1" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    message, code = run_here(config, environment)
    assert message.failure
    assert "model.safetensors" in message.failure.message
    assert code == ExitCode.NOT_FOUND
