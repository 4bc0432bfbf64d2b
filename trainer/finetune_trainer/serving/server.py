"""A model server as a child of this process: started, waited for, asked, and stopped whatever happens."""

import http.client
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_trainer import parent_death
from finetune_trainer.contract.engines import Engine, LaunchSpec
from finetune_trainer.runtime.errors import ConfigInvalid, Interrupted, ServiceUnavailable
from finetune_trainer.stop_signal import StopSignal

HOST = "127.0.0.1"
READY_SECONDS = 600.0
ANSWER_SECONDS = 600.0
STOP_SECONDS = 5.0
LOOK_SECONDS = 0.1
LAST_LINES = 15


@dataclass(frozen=True)
class Server:
    """A server that has said that it is healthy."""

    port: int
    model: str
    """The model's name in requests."""
    seconds_to_ready: float
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        """Where OpenAI's clients look for the API."""
        return f"http://{HOST}:{self.port}/v1"


@contextmanager
def serving(
    engine: Engine, model_folder: Path, stop: StopSignal, log: Path | None = None, *, host: str = HOST, port: int = 0
) -> Iterator[Server]:
    """Start a server, wait until it is ready, and stop it at the end of the block; call inside `stop.deferred()`.

    Its output goes to `log`, or where this process's own goes. Port 0 means any that is free. Whatever the address
    it listens on, this process asks it on 127.0.0.1.
    Raises Interrupted, or ServiceUnavailable with the last lines of the log.
    """
    port = port or free_port()
    launch = launch_spec(engine, model_folder.resolve(), host, port)
    started = time.monotonic()
    process = start(launch, log)
    try:
        _wait_until_ready(process, port, stop, log)
        yield Server(port, launch.model, time.monotonic() - started, process)
    finally:
        end(process)


def launch_spec(engine: Engine, model_folder: Path, host: str, port: int) -> LaunchSpec:
    """Return the server's command; raise ConfigInvalid where the engine's package is not installed."""
    if importlib.util.find_spec(engine.package) is None:
        raise ConfigInvalid(f"deploy.engine: {engine.package} is not installed here; install it, or use transformers")
    return engine.process(model_folder, host, port)


def free_port() -> int:
    """Give a port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port


def start(launch: LaunchSpec, log: Path | None) -> subprocess.Popen[bytes]:
    """Start a child in this process's group that does not outlive this process."""
    output = log.open("wb") if log else None
    try:
        return subprocess.Popen(
            [sys.executable, "-P", parent_death.__file__, str(os.getpid()), *launch.command],
            cwd=launch.working_dir,
            env={**os.environ, **launch.env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
        )
    finally:
        if output:
            output.close()


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask the child to end, and make it."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, stop: StopSignal, log: Path | None) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        if stop.requested:
            raise Interrupted
        if process.poll() is not None:
            raise ServiceUnavailable(f"the server ended with code {process.returncode} before it was ready{_tail(log)}")
        if _is_healthy(port):
            return
        if time.monotonic() > deadline:
            raise ServiceUnavailable(f"the server was not ready within {READY_SECONDS:.0f} s{_tail(log)}")
        time.sleep(LOOK_SECONDS)


def _is_healthy(port: int) -> bool:
    try:
        return _request(port, "GET", "/health", None, timeout=2.0)[0] == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False


def ask(server: Server, prompt: str, max_tokens: int, stop: StopSignal) -> str:
    """Give the greedy continuation of a prompt; raises Interrupted, or ServiceUnavailable where there is no answer."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    pool = ThreadPoolExecutor(1)  # so that a long answer does not keep us from seeing the signal
    try:
        asked = pool.submit(_request, server.port, "POST", "/v1/completions", body, ANSWER_SECONDS)
        while not wait([asked], LOOK_SECONDS).done:
            if stop.requested:
                raise Interrupted
        status, text = asked.result()
        if status != http.HTTPStatus.OK:
            raise ServiceUnavailable(f"the server answered the prompt with status {status}: {text[:500]}")
        return str(json.loads(text)["choices"][0]["text"])
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        raise ServiceUnavailable(f"the server did not answer the prompt: {error!r}") from error
    finally:
        pool.shutdown(wait=False)


def _request(port: int, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> tuple[int, str]:
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    try:
        content = json.dumps(body) if body is not None else None
        connection.request(method, path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()


def _tail(log: Path | None) -> str:
    if log is None:
        return "; its log is above"
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    return f"; the last lines of {log}:\n" + "\n".join(lines)
