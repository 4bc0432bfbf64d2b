"""Which parameter of a model each tensor in its files is.

Files keep the names of the release that wrote them. transformers renames tensors when it loads them, and joins the
tensors of experts.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)


def stored_names_of(model: Any, stored: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return name of the parameter -> stored name, for each tensor that is stored as the model has it.

    Parameters that transformers computes from several tensors, or from a tensor of another shape, are left out.
    """
    state = model.state_dict()
    rules = _Rules(model)
    names = {}
    # In the order in which transformers renames: some of its rules depend on the names before.
    for stored_name in sorted(stored, key=dot_natural_key):
        name = rules.parameter_of(stored_name, state)
        if name is not None and state[name].shape == stored[stored_name].shape:
            names[name] = stored_name
    return names


class _Rules:
    """The rules by which transformers renames the tensors in the files of a model."""

    def __init__(self, model: Any) -> None:
        rules = get_model_conversion_mapping(model)
        self._prefix = model.base_model_prefix
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]

    def parameter_of(self, stored_name: str, state: dict[str, Any]) -> str | None:
        """Return the parameter of this stored name; None if there is none, or if the tensor is a part of it."""
        name: str
        name, converter = rename_source_key(
            stored_name, self._renamings, self._converters, self._prefix, state
        )
        if name not in state and stored_name in state:
            # transformers keeps a name that the model has, too.
            name = stored_name
            converter = None
        if name not in state or converter is not None:
            return None
        return name
