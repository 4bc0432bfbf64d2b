"""`--keep-serving`: the published model on this machine, until Ctrl-C."""

import contextlib
import signal
import subprocess
import sys

from finetune_cli.laptop import Laptop


def keep_serving(laptop: Laptop) -> None:
    """Serve the model that push published; ends with Ctrl-C."""
    pipeline = laptop.cluster.store.read()
    if pipeline is None or pipeline.spec.push is None:
        return
    place = laptop.cluster.environment(pipeline).locate(pipeline.spec.push.target)
    server = subprocess.Popen([sys.executable, "-P", "-m", "finetune_trainer.serving", str(place)])
    with contextlib.suppress(KeyboardInterrupt):
        server.wait()
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
        server.wait()
