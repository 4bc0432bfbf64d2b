"""A stage reports that a device of its node may be broken, so that the operator avoids the node."""

import pytest
import torch
from support.trainer.training import environment

from finetune_trainer.contract import PrepareConfig
from finetune_trainer.contract.environment import CONFIG
from finetune_trainer.runtime import entrypoint
from finetune_trainer.runtime.errors import (
    DeviceFailed,
    DeviceUnavailable,
    ServiceUnavailable,
)

CONFIG_OF_PREPARE = PrepareConfig.model_validate(
    {
        "identity": "p",
        "model": {"uri": "m"},
        "datasets": [{"uri": "d"}],
        "recipe": {"contextLength": 64},
    }
)


@pytest.mark.parametrize(
    ("error", "device"),
    [
        (DeviceFailed("the GPU failed"), True),
        (DeviceUnavailable("the container has no GPU device"), True),
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error"), True),
        (ServiceUnavailable("the server does not respond"), False),
        (RuntimeError("size mismatch"), False),
        (OSError("No space left on device"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failure_names_a_device_that_may_be_broken(
    tmp_path, monkeypatch, error, device
):
    def fail(*_arguments):
        raise error

    monkeypatch.setattr(entrypoint, "run_or_reuse", fail)
    monkeypatch.setenv(CONFIG, CONFIG_OF_PREPARE.model_dump_json(by_alias=True))
    message, _ = entrypoint.run_stage("prepare", environment(tmp_path))
    assert message.failure
    assert message.failure.device is device
