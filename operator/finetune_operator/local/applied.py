"""Apply a manifest to a stored spec as `kubectl apply` does: a default stays what it was when it was stored."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from finetune_operator.api.rules import STORED
from finetune_operator.api.spec import PipelineSpec

Fields = Mapping[str, Any]


def fields_of(spec: PipelineSpec) -> dict[str, Any]:
    """Return the fields that the manifest sets, without defaults, as JSON."""
    return spec.model_dump(
        mode="json", by_alias=True, exclude_unset=True, exclude_none=True
    )


def with_fields(
    stored: PipelineSpec, before: Fields, manifest: PipelineSpec
) -> PipelineSpec:
    """Return the stored spec with the fields of a manifest; `before` has the fields of the manifest before.

    So another version of this program, with other defaults, makes no other result of the same manifest.
    """
    full = stored.model_dump(mode="json", by_alias=True, exclude_none=True)
    try:
        merged = _merge(full, before, fields_of(manifest))
        return PipelineSpec.model_validate(merged, context=STORED)
    except ValidationError:
        # A stored default may exclude what the manifest asks for now. Then the manifest alone counts.
        return manifest


def _merge(stored: Fields, before: Fields, now: Fields) -> dict[str, Any]:
    removed = before.keys() - now.keys()
    merged = {name: value for name, value in stored.items() if name not in removed}
    for name, value in now.items():
        earlier = merged.get(name)
        if isinstance(value, dict) and isinstance(earlier, dict):
            # What was a list or a text before has no fields to remove.
            past = before.get(name)
            past_fields = past if isinstance(past, dict) else {}
            merged[name] = _merge(earlier, past_fields, value)
        else:
            merged[name] = value
    return merged
