"""The spec of a manifest that sets fields of the training only."""

from pathlib import Path
from typing import Any

import yaml

from finetune_cli.manifest.manifest import read
from finetune_operator.api.spec import PipelineSpec

KIND = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTunePipeline"}


def spec_of(tmp_path: Path, **train: Any) -> PipelineSpec:
    """Return the spec of a manifest with these fields of the training."""
    spec = {
        "model": {"uri": "base"},
        "datasets": [{"uri": "data.jsonl"}],
        "train": train,
    }
    file = tmp_path / "p.yaml"
    file.write_text(yaml.safe_dump({**KIND, "metadata": {"name": "a"}, "spec": spec}))
    return read(file).spec
