"""`transformers serve`, of the trainer's image."""

from pathlib import PurePosixPath

from finetune_operator.cluster.kubernetes.engines.base import PORT, Launch
from finetune_trainer.contract import served_name


def transformers(model: PurePosixPath) -> Launch:
    """Serve on the accelerator where there is one, else on processors."""
    program = ("python", "-P", "-m", "finetune_trainer.serving", str(model))
    return Launch((*program, "--host", "0.0.0.0", "--port", str(PORT)), served_name(model.name))  # noqa: S104  a pod's own
