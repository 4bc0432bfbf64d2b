"""Model servers on this machine: processes of the trainer, and requests to them."""

import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import IO, Any

from finetune_cli.conversation import SHOWN_CHARACTERS, RequestRefused
from finetune_operator.errors import ClusterError
from finetune_trainer import parent_death
from finetune_trainer.contract import Environment
from finetune_trainer.listening import free_port, loopback

PROGRAM = (sys.executable, "-P", "-m", "finetune_trainer.serving")
"""The trainer's program that serves a model."""
# A long answer of a large model on a processor takes minutes until its first piece.
ANSWER_SECONDS = 600.0
POLL_SECONDS = 0.1
STOP_SECONDS = 10.0
"""Time between SIGTERM and SIGKILL; the trainer stops its own child within 5 s."""
LOG_LINES = 15
"""Lines of the server's log in an error."""


@dataclass(frozen=True)
class LocalEndpoint:
    """A model server at a port of this machine."""

    port: int

    def get(self, path: str) -> Any:
        """Return the JSON at a path; raise ClusterError."""
        with self._response("GET", path) as response:
            return json.loads(response.read())

    def post(self, path: str, body: Mapping[str, Any]) -> Iterator[str]:
        """Yield the lines of the response as they arrive; raise ClusterError."""
        with self._response("POST", path, json.dumps(body)) as response:
            for line in response:
                yield line.decode(errors="replace").rstrip("\n")

    @contextmanager
    def _response(
        self, method: str, path: str, body: str | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        # urllib would send the request through the proxy of the user's environment.
        connection = http.client.HTTPConnection(
            loopback(), self.port, timeout=ANSWER_SECONDS
        )
        with contextlib.closing(connection):
            try:
                headers = {"Content-Type": "application/json"}
                connection.request(method, path, body, headers)
                response = connection.getresponse()
                if response.status != HTTPStatus.OK:
                    raise RequestRefused(_refusal(response))
                yield response
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise ClusterError(
                    f"the model's server on port {self.port} does not answer: {error!r}"
                ) from error


def _refusal(response: http.client.HTTPResponse) -> str:
    text = response.read().decode(errors="replace")
    with contextlib.suppress(ValueError, LookupError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    return f"the model's server refuses the request: {text[:SHOWN_CHARACTERS]} (HTTP {response.status})"


@dataclass(frozen=True)
class ModelServer:
    """A server that this process has started."""

    process: subprocess.Popen[bytes]
    endpoint: LocalEndpoint
    log: IO[bytes]

    def wait_until_ready(self) -> None:
        """Wait until the server has loaded its model; raise ClusterError with its log if it ends before."""
        # The trainer's process ends if its server is not ready in time.
        while self.process.poll() is None:
            with contextlib.suppress(ClusterError):
                self.endpoint.get("/v1/models")
                return
            time.sleep(POLL_SECONDS)
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").splitlines()[-LOG_LINES:]
        raise ClusterError("\n".join(("the model's server has ended:", *lines)))


@contextmanager
def model_server(
    arguments: Sequence[str], environment: Environment
) -> Iterator[ModelServer]:
    """Start a server with these arguments of `finetune_trainer.serving`, and stop it at the end of the block."""
    port = free_port()
    # The kernel kills the server if this process is killed.
    watcher = (sys.executable, "-P", parent_death.__file__, str(os.getpid()))
    # A file without a name: nothing of it is left, however this process ends.
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            (*watcher, *PROGRAM, *arguments, "--port", str(port)),
            env=os.environ | environment.variables(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C in the terminal stops the answer, and not the server.
            start_new_session=True,
        )
        try:
            yield ModelServer(process, LocalEndpoint(port), log)
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        # After a second Ctrl-C, too; its child ends with it.
        process.kill()
        process.wait()
