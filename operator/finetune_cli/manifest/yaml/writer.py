"""Writes a manifest as YAML."""

from collections.abc import Mapping
from typing import Any

import yaml

from finetune_cli.manifest.yaml.reader import LineLoader
from finetune_operator.api.group import API_VERSION, KIND

WIDTH = 118
"""Longest line of a text in a manifest."""


class _ManifestDumper(yaml.SafeDumper):
    """Puts each text in quotes that Kubernetes would read as a number or as true or false, such as y and 1e3."""


for _first, _resolvers in LineLoader.yaml_implicit_resolvers.items():
    for _tag, _pattern in _resolvers:
        _ManifestDumper.add_implicit_resolver(_tag, _pattern, [_first])


def to_yaml(metadata: Mapping[str, Any], spec: Mapping[str, Any]) -> str:
    """Return a manifest, with its fields in the order of the mappings."""
    document = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": metadata,
        "spec": spec,
    }
    text: str = yaml.dump(
        document,
        Dumper=_ManifestDumper,
        sort_keys=False,
        allow_unicode=True,
        width=WIDTH,
    )
    return text
