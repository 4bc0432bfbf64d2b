"""Texts that the model generates before training and at validations. Training gets the same bytes without them."""

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)
from typing_extensions import override

from finetune_trainer.contract import Samples
from finetune_trainer.contract.sample_rows import SampleRow
from finetune_trainer.data.chat_templates import use_chat_templates
from finetune_trainer.data.records.chat_template import dated_template_of, end_tokens
from finetune_trainer.publishing.generation_config import all_end_tokens
from finetune_trainer.runtime.progress.activity import activity
from finetune_trainer.training.model.document_attention import attention_with_mask
from finetune_trainer.training.model.model import TrainedModel


class SampleGenerator:
    """Generates a text for each prompt, greedily and in their order."""

    def __init__(
        self,
        settings: Samples,
        base: Path,
        *,
        conversations: bool,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """Take the templates of training by name; without any, the base model's are used."""
        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            base, local_files_only=True
        )
        use_chat_templates(self._tokenizer, chat_templates or {})
        self._conversations = conversations
        if conversations:
            self._tokenizer.chat_template = dated_template_of(self._tokenizer)
        self._settings = settings

    def rows(
        self,
        model: TrainedModel,
        step: int,
        raise_if_stop_requested: Callable[[], None],
    ) -> list[SampleRow]:
        """Return the text of each prompt as the rows of a step. Raise as `texts`."""
        texts = self.texts(model, raise_if_stop_requested)
        return [SampleRow(step, prompt, text) for prompt, text in texts.items()]

    def texts(
        self, model: TrainedModel, raise_if_stop_requested: Callable[[], None]
    ) -> dict[str, str]:
        """Return the text of each prompt. The model is in training mode afterwards.

        Raise ValueError if a prompt has tokens or positions that the model does not have.
        """
        for prompt, tokens in self._prompts.items():
            _check(prompt, tokens, model)
        model.model.eval()
        try:
            with (
                torch.no_grad(),
                model.autocast(),
                attention_with_mask(model),
                model.eager(),
            ):
                return {
                    prompt: self._text(model, tokens, raise_if_stop_requested)
                    for prompt, tokens in self._prompts.items()
                }
        finally:
            model.model.train()

    def _text(
        self,
        model: TrainedModel,
        tokens: list[int],
        raise_if_stop_requested: Callable[[], None],
    ) -> str:
        ends = all_end_tokens(
            model.model.generation_config.eos_token_id,
            end_tokens(self._tokenizer, conversations=self._conversations),
        )
        padding = self._tokenizer.pad_token_id
        # transformers wants a padding token, and would log a line for each prompt without it.
        if padding is None and ends:
            padding = ends[0]
        config = GenerationConfig(
            max_new_tokens=int(
                min(self._settings.max_new_tokens, model.positions - len(tokens))
            ),
            # Greedy: the same weights give the same text, also in a resumed process.
            do_sample=False,
            num_beams=1,
            eos_token_id=ends or None,
            pad_token_id=padding,
        )
        given = torch.tensor([tokens], device=model.device)
        generated = model.model.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList(
                [_StopSignalCheck(raise_if_stop_requested)]
            ),
        )
        return str(
            self._tokenizer.decode(
                generated[0, len(tokens) :], skip_special_tokens=True
            )
        )

    @cached_property
    def _prompts(self) -> dict[str, list[int]]:
        """The tokens of each prompt: encoded at the first use, when an error of a chat template ends no training."""
        return {prompt: self._encoded(prompt) for prompt in self._settings.prompts}

    def _encoded(self, prompt: str) -> list[int]:
        """Return the prompt as training would have it before a completion: without EOS."""
        if self._conversations:
            message = [{"role": "user", "content": prompt}]
            text = self._tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True
            )
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        tokens = list(self._tokenizer(prompt)["input_ids"])
        if len(tokens) > 1 and tokens[-1] == self._tokenizer.eos_token_id:
            return tokens[:-1]
        return tokens


def _check(prompt: str, tokens: list[int], model: TrainedModel) -> None:
    """Raise ValueError if the model has no embedding of a token or position.

    On a GPU that would end the process, not the samples.
    """
    if len(tokens) >= model.positions:
        has = f"has {len(tokens)} tokens, and the model {model.positions} positions"
        raise ValueError(
            f"the prompt {prompt[:40]!r} {has}: shorten it in train.samples.prompts"
        )
    if max(tokens) >= model.vocabulary:
        has = f"has token {max(tokens)}, and the model 0 to {model.vocabulary - 1}"
        raise ValueError(
            f"the prompt {prompt[:40]!r} {has}: the tokenizer is of another model"
        )


class _StopSignalCheck(StoppingCriteria):  # type: ignore[misc]  # the class has no types
    """Ends nothing, but raises Interrupted between two tokens if the process is to stop."""

    def __init__(self, raise_if_stop_requested: Callable[[], None]) -> None:
        self._raise_if_stop_requested = raise_if_stop_requested

    @override
    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        activity.report()
        self._raise_if_stop_requested()
        return torch.zeros(
            input_ids.shape[0], dtype=torch.bool, device=input_ids.device
        )
