"""Logs have no warnings of libraries about the way in which this program calls them."""

import logging
import warnings
from pathlib import Path

import pytest
from support.operator.adapters import make_adapter

from finetune_trainer.runtime.foreign_warnings import without_messages


def test_model_with_an_adapter_loads_without_warnings(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import torch  # noqa: PLC0415  tests without a model must not wait for torch

    from finetune_trainer.evaluation.language_model import EvaluatedModel, load_lm  # noqa: PLC0415
    from finetune_trainer.models.base_model import BaseModel  # noqa: PLC0415

    make_adapter(tmp_path, tiny_model, seed=0)
    model = EvaluatedModel(BaseModel("m", tiny_model, ""), tmp_path, torch.float32)
    tokenizer = model.load_tokenizer(apply_chat_template=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        load_lm(
            model,
            tokenizer,
            (2,),
            torch.device("cpu"),
            batch_size=1,
            apply_chat_template=False,
        )
    assert not [
        record for record in caplog.records if record.name.startswith("lm_eval")
    ]


def test_other_messages_of_the_logger_are_kept(caplog: pytest.LogCaptureFixture):
    logger = logging.getLogger("a.library")
    with without_messages("a.library", "known"):
        logger.warning("known: %s", 1)
        logger.warning("new")
    logger.warning("known again")
    assert caplog.messages == ["new", "known again"]
