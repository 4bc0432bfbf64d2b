"""Check of a task's generation_kwargs by generating with a model of three tokens, as evaluate generates later."""

import copy
import difflib
import functools
import logging
import re
import warnings
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from typing_extensions import override

from finetune_trainer.runtime.errors import ConfigInvalid, short_reason

WORD = "a"
UNKNOWN = "<unk>"
END = "</s>"
# A task may ask for many tokens. The first takes every path that the others take.
MOST_TOKENS = 1
"""Tokens that are generated."""
OF_LM_EVAL = ("until", "max_gen_toks", "max_new_tokens", "max_tokens", "do_sample")
"""Keys of generation_kwargs that lm-eval reads itself."""
# Longer than any answer: only the real model knows its limit.
CONTEXT_LENGTH = 1 << 40
FIX = "correct it in the task file"


class _SmallModel(HFLM):  # type: ignore[misc]  # lm-eval's module has no types
    @override
    def _model_generate(
        self, context: Any, max_length: int, stop: list[str], **arguments: Any
    ) -> Any:
        length = min(max_length, context.shape[1] + MOST_TOKENS)
        return super()._model_generate(context, length, stop, **arguments)


def check_generation(arguments: Any) -> None:
    """Raise ConfigInvalid for generation_kwargs with which lm-eval and transformers cannot generate."""
    request = Instance("generate_until", {}, (WORD, copy.deepcopy(arguments)), 0)
    level = logging.root.manager.disable
    # The same warnings follow when the task is evaluated.
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _small_model().generate_until([request], disable_tqdm=True)
    except MemoryError:
        raise
    except Exception as error:
        raise ConfigInvalid(_problem(error, arguments)) from error
    finally:
        logging.disable(level)


@functools.cache
def _small_model() -> _SmallModel:
    words = {UNKNOWN: 0, END: 1, WORD: 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token=UNKNOWN)),
        unk_token=UNKNOWN,
        eos_token=END,
        pad_token=END,
    )
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=CONTEXT_LENGTH,
    )
    return _SmallModel(
        pretrained=LlamaForCausalLM(config), tokenizer=tokenizer, backend="causal"
    )


def _problem(error: Exception, arguments: dict[str, Any]) -> str:
    text = str(error)
    unused = re.search(r"not used by the model: \['(\w+)'", text)
    if unused:
        known = [*OF_LM_EVAL, *GenerationConfig().to_dict()]
        return _unknown(unused[1], known)
    # An argument that lm-eval passes itself.
    repeated = re.search(r"multiple values for keyword argument '(\w+)'", text)
    if repeated:
        return _unknown(repeated[1], ["until"])
    shown = {key: value for key, value in arguments.items() if key != "until"}
    return f"generation_kwargs {shown} cannot be used: {short_reason(error)}; {FIX}"


def _unknown(key: str, known: list[str]) -> str:
    hint = "remove it"
    nearest = difflib.get_close_matches(key, known, 1)
    if key == "stop":
        nearest = ["until"]
    if nearest:
        hint = f"did you mean {nearest[0]}?"
    return f"generation_kwargs: no argument {key} exists here; {hint}"
