"""`--keep-serving`: serve the published model on this machine until Ctrl-C."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune_cli.diagnostics import UsageError
from finetune_cli.local.published import (
    model_argument,
    published_model,
    run_environment,
)
from finetune_cli.local.run import LocalRun
from finetune_cli.local.serving.model_server import PROGRAM, LocalEndpoint
from finetune_cli.local.work_folder import SERVER
from finetune_operator.errors import ClusterError
from finetune_trainer.listening import free_port, listen_on_loopback
from finetune_trainer.parent_death import die_with_parent

PORTS = range(1, 1 << 16)


def check_port(port: int) -> None:
    """Raise UsageError if no server can listen on this port."""
    if port not in PORTS:
        raise UsageError(f"--port {port}: must be from 1 to {PORTS[-1]}")
    try:
        listen_on_loopback(port).close()
    except OSError as error:
        # Python adds the address to the text of the system.
        reason = os.strerror(error.errno or 0)
        raise UsageError(f"--port {port}: {reason}; choose another port") from error


def keep_serving(local_run: LocalRun, port: int | None = None) -> bool:
    """Serve the model that push published, until Ctrl-C or SIGTERM.

    Return False if there is no published model or its server fails.
    """
    folder = local_run.workdir
    pipeline = local_run.cluster.pipeline_file.read()
    uri = published_model(pipeline)
    if pipeline is None or uri is None:
        print(
            "--keep-serving: no merged model was published; add a target to spec.push.targets of the manifest",
            file=sys.stderr,
        )
        return False
    port = port or free_port()
    environment = run_environment(folder, pipeline)
    model = model_argument(environment, uri)
    # As Ctrl-C, so that the server is stopped before this process ends.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    with _recorded(folder, port, uri):
        server = subprocess.Popen(
            (*PROGRAM, model, "--port", str(port)),
            env=os.environ | environment.variables(),
            # stdout may hold the status as JSON.
            stdout=sys.stderr,
            preexec_fn=die_with_parent,  # noqa: PLW1509  this process has no other threads
        )
        with contextlib.suppress(KeyboardInterrupt):
            server.wait()
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
            server.wait()
    return server.returncode == 0


@contextmanager
def _recorded(folder: Path, port: int, uri: str) -> Iterator[None]:
    """Record the server of this process in the run's folder, so that `finetune ask` finds it."""
    with (folder / SERVER).open("a") as record:
        try:
            # The kernel releases the lock if this process is killed.
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Another command serves the model, too.
            yield
            return
        record.truncate(0)
        record.write(json.dumps({"port": port, "uri": uri}))
        record.flush()
        yield


def kept_server(folder: Path, uri: str) -> LocalEndpoint | None:
    """Return the server of `--keep-serving` that serves this model, or None."""
    try:
        with (folder / SERVER).open() as record:
            try:
                fcntl.flock(record, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            else:
                return None
            known = json.load(record)
        endpoint = LocalEndpoint(known["port"])
        # It may still load the model.
        endpoint.get("/v1/models")
    except (OSError, ValueError, LookupError, ClusterError):
        return None
    return endpoint if known["uri"] == uri else None
