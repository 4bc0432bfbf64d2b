"""Run one stage: `python -m finetune_trainer STAGE`."""

import os
import sys

from finetune_trainer.stop_signal import stop

# Before the other imports: they take seconds, and SIGTERM may arrive meanwhile.
stop.install()

# OpenMP threads sleep while they wait for each other. On busy cores, spinning is many times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from finetune_trainer.runtime.machine.caches import provide_cache_folder  # noqa: E402

# Before libraries read where their caches are. A user that the cluster chooses may own no home.
provide_cache_folder()

from finetune_trainer.runtime.entrypoint import main  # noqa: E402

code = main(sys.argv[1:])
sys.stdout.flush()
sys.stderr.flush()
# Without waiting for threads and atexit hooks of libraries: all results are already on disk.
os._exit(code)
