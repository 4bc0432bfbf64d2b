"""The pushed model behind an OpenAI-compatible endpoint of this machine.

An engine is one file that says how its server is started, and one line here.
"""

from finetune_trainer.serving import transformers_serve, vllm_serve
from finetune_trainer.serving.engine import Engine

ENGINES: dict[str, Engine] = {
    "transformers": transformers_serve.launch,
    "vllm": vllm_serve.launch,
}
