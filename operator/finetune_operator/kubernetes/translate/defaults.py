"""Read the defaults of a namespace from its ConfigMap: pure."""

from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError
from typing_extensions import override

from finetune_operator.api.conditions import Reason
from finetune_operator.api.defaults import NO_DEFAULTS, Defaults
from finetune_operator.core.observation import Blocker
from finetune_operator.kubernetes.translate.api_errors import describe_first_error

NAME = "finetune-defaults"
KEY = "defaults.yaml"
# Its author is any user of the namespace, and parsing it holds up the event loop.
MAX_CHARACTERS = 8_192
"""Characters of the file."""


@dataclass(frozen=True)
class NamespaceDefaults:
    """The defaults of a namespace, or why they cannot be used."""

    defaults: Defaults = NO_DEFAULTS
    error: str = ""

    @property
    def blocker(self) -> Blocker | None:
        """Return why no attempt may start; None if attempts may start."""
        return Blocker(Reason.SPEC_INVALID, self.error) if self.error else None


NONE = NamespaceDefaults()


def read_defaults(config_map: dict[str, Any]) -> NamespaceDefaults:
    """Return the defaults of a ConfigMap. Raises nothing: an error is a fact about the namespace."""
    data = config_map.get("data") or {}
    if set(data) != {KEY}:
        return _invalid(
            f"has the keys {', '.join(sorted(data)) or 'none'}: write one key, {KEY}"
        )
    text = data[KEY]
    if len(text) > MAX_CHARACTERS:
        return _invalid(
            f"{KEY} has {len(text):,} characters: write at most {MAX_CHARACTERS:,}"
        )
    try:
        content = yaml.load(text, _DefaultsLoader)  # noqa: S506  a safe loader
        if content is None:
            # An empty file sets no defaults.
            content = {}
        return NamespaceDefaults(Defaults.model_validate(content))
    except ValidationError as error:
        return _invalid(
            f"{KEY}: {describe_first_error(error, observed=True)}: correct it, or delete the ConfigMap"
        )
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return _invalid(
            f"{KEY}: {' '.join(str(error).split())}: correct it, or delete the ConfigMap"
        )


def _invalid(problem: str) -> NamespaceDefaults:
    return NamespaceDefaults(
        error=f"the ConfigMap {NAME} of this namespace cannot be used: {problem}"
    )


class _DefaultsLoader(yaml.SafeLoader):
    """A safe loader without aliases, which let a short text stand for a huge value."""

    @override
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias (*name) is not allowed")
        return super().compose_node(parent, index)
