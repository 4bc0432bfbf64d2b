"""Model servers. An engine is one file that says how its container is started, and one line here."""

from finetune_operator.cluster.kubernetes.engines.base import Engine
from finetune_operator.cluster.kubernetes.engines.transformers import transformers
from finetune_operator.cluster.kubernetes.engines.vllm import vllm

ENGINES: dict[str, Engine] = {
    "transformers": transformers,
    "vllm": vllm,
}
