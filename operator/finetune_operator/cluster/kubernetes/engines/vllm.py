"""`vllm serve`, of vLLM's image; it wants GPUs."""

from pathlib import PurePosixPath

from finetune_operator.cluster.kubernetes.engines.base import PORT, Launch

OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"}


def vllm(model: PurePosixPath) -> Launch:
    """Serve under the folder's name; more is told to it by deploy.args."""
    program = ("vllm", "serve", str(model), "--served-model-name", model.name)
    return Launch((*program, "--host", "0.0.0.0", "--port", str(PORT)), model.name, OFFLINE)  # noqa: S104  a pod's own
