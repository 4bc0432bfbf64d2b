"""`--keep-serving`: serve the published model on this machine until Ctrl-C."""

import contextlib
import signal
import subprocess
import sys

from finetune_cli.local.run import LocalRun
from finetune_operator.core.pipeline import Pipeline
from finetune_trainer.contract import PushResult
from finetune_trainer.parent_death import die_with_parent


def keep_serving(local_run: LocalRun) -> bool:
    """Serve the model that push published, until Ctrl-C or SIGTERM.

    Return False if there is no published model or its server fails.
    """
    pipeline = local_run.cluster.pipeline_file.read()
    uri = published_model(pipeline)
    if pipeline is None or uri is None:
        print(
            "--keep-serving: no merged model was published; add a target to spec.push.targets of the manifest",
            file=sys.stderr,
        )
        return False
    model = local_run.cluster.environment(pipeline).locate(uri)
    # As Ctrl-C, so that the server is stopped before this process ends.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "finetune_trainer.serving", str(model)],
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


def published_model(pipeline: Pipeline | None) -> str | None:
    """Return the URI of the merged model that push published, or None."""
    if pipeline is None:
        return None
    push = pipeline.status.stages.get("push")
    if push is None or not isinstance(push.result, PushResult):
        return None
    # An adapter cannot be served without its base model.
    merged = push.result.first("Merged")
    if merged is None:
        return None
    return merged.uri
