"""The manifest of the demo, with other fields."""

import copy
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
MANIFEST = yaml.safe_load((ROOT / "examples" / "demo" / "pipeline.yaml").read_text())


def manifest_with(name: str, **stages: dict[str, Any]) -> dict[str, Any]:
    """Return the demo's manifest under another name, with fields of stages replaced."""
    manifest: dict[str, Any] = copy.deepcopy(MANIFEST)
    manifest["metadata"]["name"] = name
    for stage, fields in stages.items():
        manifest["spec"].setdefault(stage, {}).update(fields)
    return manifest
