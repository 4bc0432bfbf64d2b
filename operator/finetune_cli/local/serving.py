"""`--keep-serving`: serve the published model on this machine until Ctrl-C."""

import contextlib
import signal
import subprocess
import sys

from finetune_cli.local.run import LocalRun
from finetune_trainer.parent_death import die_with_parent


def keep_serving(local_run: LocalRun) -> bool:
    """Serve the model that push published, until Ctrl-C or SIGTERM.

    Return False if there is no published model or its server fails.
    """
    pipeline = local_run.cluster.pipeline_file.read()
    if pipeline is None or pipeline.spec.push is None:
        print("--keep-serving: no model was published; add spec.push.target to the manifest", file=sys.stderr)
        return False
    model = local_run.cluster.environment(pipeline).locate(pipeline.spec.push.target)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "finetune_trainer.serving", str(model)],
        stdout=sys.stderr,
        preexec_fn=die_with_parent,  # noqa: PLW1509  this process has no other threads
    )
    with contextlib.suppress(KeyboardInterrupt):
        server.wait()
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
        server.wait()
    return server.returncode == 0
