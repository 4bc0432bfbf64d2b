"""`python -m finetune_trainer STAGE`."""

import os
import sys

from finetune_trainer.stop_signal import stop

stop.install()  # before everything else: an import may take seconds, and SIGTERM may come in any of them

# Threads that wait for each other sleep. Where other programs want the cores, spinning is many times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from finetune_trainer.runtime.entrypoint import main  # noqa: E402

code = main(sys.argv[1:])
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)  # without waiting for other people's threads and atexit hooks: everything that counts is on the disk
