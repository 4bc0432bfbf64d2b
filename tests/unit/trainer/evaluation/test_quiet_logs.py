"""Logs have no warnings of libraries about the way in which this program calls them."""

import logging
import warnings
from pathlib import Path

import pytest
from support.operator.adapters import make_adapter
from support.trainer.evaluation import load_tiny_lm

from finetune_trainer.runtime.foreign_warnings import without_messages


def test_model_with_an_adapter_loads_without_warnings(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_adapter(tmp_path, tiny_model, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        load_tiny_lm(tiny_model, tmp_path)
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
