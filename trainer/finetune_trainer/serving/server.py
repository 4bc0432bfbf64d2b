"""A model server as a child process: start it, wait until it is ready, send requests, and stop it in any case."""

import http.client
import importlib.util
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_trainer.contract.engines import Engine, LaunchSpec, model_name
from finetune_trainer.contract.smoke_test import Question
from finetune_trainer.listening import free_port, loopback, url_host
from finetune_trainer.runtime.child_process import ending_with_this_process
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    Interrupted,
    ServiceUnavailable,
)
from finetune_trainer.runtime.progress.activity import activity
from finetune_trainer.stop_signal import StopSignal

# Loading a large model takes minutes.
READY_TIMEOUT_SECONDS = 600.0
"""Time for the first successful health check."""
ANSWER_TIMEOUT_SECONDS = 600.0
STOP_TIMEOUT_SECONDS = 5.0
"""Time between SIGTERM and SIGKILL."""
POLL_SECONDS = 0.1
HEALTH_TIMEOUT_SECONDS = 2.0
LIST_TIMEOUT_SECONDS = 30.0
REQUEST_ERRORS = (
    OSError,
    http.client.HTTPException,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
)
"""Errors of a request, and of a response in another form."""
LOG_TAIL_LINES = 15
"""Lines of the server's log in an error message."""


@dataclass(frozen=True)
class Server:
    """A running server that has passed its health check."""

    port: int
    model: str
    """The model's name in requests."""
    seconds_to_ready: float
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        """The base URL of the OpenAI-compatible API."""
        return f"http://{url_host(loopback())}:{self.port}/v1"


@contextmanager
def serving(
    engine: Engine,
    model_folder: Path,
    stop: StopSignal,
    log: Path | None = None,
    *,
    name: str = "",
    host: str = "",
    port: int = 0,
) -> Iterator[Server]:
    """Start a server, wait until it is ready, and stop it at the end of the block. Call inside `stop.deferred()`.

    The server's output goes to `log`, or to this process's stdout. Port 0 means any free port. `host` is the address
    to listen on, by default the loopback, to which requests of this process always go. `name` is the model's name in
    requests; if it is empty, the folder names the model.

    Raise ConfigInvalid, Interrupted, or ServiceUnavailable with the last lines of the log.
    """
    port = port or free_port()
    folder = model_folder.resolve()
    with _named(folder, name or model_name(str(folder))) as folder:
        launch = launch_spec(engine, folder, host or loopback(), port)
        started = time.monotonic()
        process = start_process(launch, log)
        try:
            _wait_until_ready(process, port, stop, log)
            yield Server(port, launch.model, time.monotonic() - started, process)
        finally:
            stop_process(process)


@contextmanager
def _named(folder: Path, name: str) -> Iterator[Path]:
    """Yield the folder under this name: `transformers serve` takes the model's name in requests from its folder."""
    if folder.name == name:
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        link = Path(temporary) / name
        link.symlink_to(folder)
        yield link


def launch_spec(engine: Engine, model_folder: Path, host: str, port: int) -> LaunchSpec:
    """Return the server's launch spec; raise ConfigInvalid if the engine's package is not installed."""
    if importlib.util.find_spec(engine.package) is None:
        raise ConfigInvalid(
            f"deploy.engine: the package {engine.package} is not installed; install it or set the engine Transformers"
        )
    return engine.process(model_folder, host, port)


def start_process(launch: LaunchSpec, log: Path | None) -> subprocess.Popen[bytes]:
    """Start a child process in this process's group; the child is killed when this process ends."""
    output = log.open("wb") if log else None
    try:
        return subprocess.Popen(
            ending_with_this_process(launch.command),
            cwd=launch.working_dir,
            env={**os.environ, **launch.env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
        )
    finally:
        # The child has its own descriptor of the log.
        if output:
            output.close()


def stop_process(process: subprocess.Popen[bytes]) -> None:
    """Stop the child process with SIGTERM, and with SIGKILL after STOP_TIMEOUT_SECONDS."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_until_ready(
    process: subprocess.Popen[bytes], port: int, stop: StopSignal, log: Path | None
) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_SECONDS
    while True:
        # This wait has its own limit, and so has the answer.
        activity.report()
        if stop.requested:
            raise Interrupted
        # Before the health check: another server on this port would answer it in place of a server that has ended.
        if process.poll() is not None:
            raise ServiceUnavailable(
                f"the server exited with code {process.returncode} before it was ready{_tail(log)}"
            )
        if _is_healthy(port):
            return
        if time.monotonic() > deadline:
            raise ServiceUnavailable(
                f"the server was not ready within {READY_TIMEOUT_SECONDS:.0f} s{_tail(log)}"
            )
        time.sleep(POLL_SECONDS)


def _is_healthy(port: int) -> bool:
    try:
        status, _ = _request(port, "GET", "/health", None, HEALTH_TIMEOUT_SECONDS)
    except (OSError, http.client.HTTPException):
        return False
    return status == http.HTTPStatus.OK


def check_listed(server: Server) -> None:
    """Raise ServiceUnavailable unless the server's list of models has the model: clients read the list first."""
    try:
        status, text = _request(
            server.port, "GET", "/v1/models", None, LIST_TIMEOUT_SECONDS
        )
        models = [model["id"] for model in json.loads(text)["data"]]
    except REQUEST_ERRORS as error:
        raise ServiceUnavailable(
            f"the server did not answer GET /v1/models: {error!r}"
        ) from error
    if status != http.HTTPStatus.OK or server.model not in models:
        raise ServiceUnavailable(
            f"GET /v1/models answered with status {status} and without {server.model}: {text[:500]}"
        )


def ask(server: Server, question: Question, stop: StopSignal) -> str:
    """Return the answer to a question; raise Interrupted, or ServiceUnavailable if the request fails."""
    # In the background, so that this thread can check for the stop signal.
    pool = ThreadPoolExecutor(1)
    try:
        request = pool.submit(
            _request,
            server.port,
            "POST",
            question.path,
            question.body(server.model),
            ANSWER_TIMEOUT_SECONDS,
        )
        while not wait([request], POLL_SECONDS).done:
            activity.report()
            if stop.requested:
                raise Interrupted
        status, text = request.result()
        if status != http.HTTPStatus.OK:
            raise ServiceUnavailable(
                f"the server answered the prompt with status {status}: {text[:500]}"
            )
        return question.answer(json.loads(text))
    except REQUEST_ERRORS as error:
        raise ServiceUnavailable(
            f"the server did not answer the prompt: {error!r}"
        ) from error
    finally:
        # Without waiting: after a stop signal the request may still take minutes.
        pool.shutdown(wait=False)


def _request(
    port: int, method: str, path: str, body: dict[str, Any] | None, timeout: float
) -> tuple[int, str]:
    connection = http.client.HTTPConnection(loopback(), port, timeout=timeout)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()


def _tail(log: Path | None) -> str:
    if log is None:
        return "; see its log above"
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return f"; the last lines of {log}:\n" + "\n".join(lines)
