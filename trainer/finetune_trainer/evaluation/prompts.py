"""How lm-eval writes a question: as plain text, or as a conversation with the chat template of training."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from finetune_trainer.contract import EvaluateRecipe
from finetune_trainer.data.records.chat_template import dated_template_of, writes_bos
from finetune_trainer.publishing.generation_config import all_end_tokens
from finetune_trainer.runtime.errors import ConfigInvalid


@dataclass(frozen=True)
class PromptFormat:
    """The arguments of lm_eval.evaluate by these names."""

    apply_chat_template: bool
    fewshot_as_multiturn: bool
    system_instruction: str | None

    @classmethod
    def of(cls, recipe: EvaluateRecipe, *, conversations: bool) -> "PromptFormat":
        """Return the format of a recipe; `conversations` is whether the training records are conversations.

        Raise ConfigInvalid for turns without a chat template, as lm-eval's command line does.
        """
        template = recipe.apply_chat_template
        # A model that was trained on turns is asked in turns.
        if template is None:
            template = conversations
        multiturn = recipe.fewshot_as_multiturn
        if multiturn is None:
            multiturn = template
        if multiturn and not template:
            raise ConfigInvalid(
                "evaluate.fewshotAsMultiturn is true, but no chat template is applied; "
                "add evaluate.applyChatTemplate: true, or remove fewshotAsMultiturn"
            )
        return cls(template, multiturn, recipe.system_instruction)


def set_chat_template(tokenizer: Any) -> None:
    """Set the template of training, with the same fixed date, so that a score does not depend on the day."""
    tokenizer.chat_template = dated_template_of(tokenizer)


def needs_no_bos(tokenizer: Any) -> bool:
    """Return whether BOS must be kept out of prompts: the tokenizer writes it, but neither template nor training does.

    lm-eval itself leaves BOS out only if the template has written it already.
    """
    if not writes_bos(tokenizer):
        return False
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "?"}], tokenize=False
    )
    return not str(prompt).startswith(tokenizer.bos_token)


def set_end_tokens(model: Any, ends: Sequence[int]) -> None:
    """Make generation stop at these tokens, besides the tokens in the model's configuration."""
    config = model.generation_config
    # Transformers takes None, and not an empty list, for no end tokens.
    config.eos_token_id = all_end_tokens(config.eos_token_id, ends) or None
