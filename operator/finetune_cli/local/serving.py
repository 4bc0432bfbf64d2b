"""`--keep-serving`: the published model on this machine, until Ctrl-C."""

import contextlib
import signal
import subprocess
import sys

from finetune_cli.local.run import LocalRun
from finetune_trainer.parent_death import die_with_parent


def keep_serving(laptop: LocalRun) -> bool:
    """Serve the model that push published, until Ctrl-C or SIGTERM; False where there is none or its server fails."""
    pipeline = laptop.cluster.pipeline_file.read()
    if pipeline is None or pipeline.spec.push is None:
        print("--keep-serving: there is no model to serve; add push.target", file=sys.stderr)
        return False
    place = laptop.cluster.environment(pipeline).locate(pipeline.spec.push.target)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "finetune_trainer.serving", str(place)],
        stdout=sys.stderr,
        preexec_fn=die_with_parent,  # noqa: PLW1509  what forks here has no thread of its own
    )
    with contextlib.suppress(KeyboardInterrupt):
        server.wait()
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
        server.wait()
    return server.returncode == 0
