"""The adapter that training starts from: its files, and the digest to which the training is bound."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_trainer.contract import AdapterSource, Environment
from finetune_trainer.models.base_model import BaseModel
from finetune_trainer.runtime.artifacts import MANIFEST, digest_file, digest_of_value
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.stores.model_files import ADAPTER_FILES, fetch_adapter


@dataclass(frozen=True)
class StartAdapter:
    """An adapter on this machine."""

    uri: str
    """URI in the manifest, for errors."""
    folder: Path
    config: dict[str, Any]
    """The content of adapter_config.json."""
    digest: str
    """sha256:… over both files."""
    pin: str | None = None
    """Identifies the content at the store; None for a folder on this machine."""
    base_digest: object = None
    """Digest of the base model that the adapter was trained on; None if its folder does not name it."""

    def require(self, expected: str | None, reader: str) -> None:
        """Raise ConfigInvalid if `reader` has found another adapter; None means unknown."""
        if expected not in {None, self.digest}:
            raise ConfigInvalid(
                f"train.startFrom {self.uri} has the digest {self.digest}, but {reader} has found {expected}: "
                "restore that adapter, or set startFrom.revision to a new text to start from this adapter"
            )

    def require_base(self, base: BaseModel) -> None:
        """Raise ConfigInvalid if the adapter was trained on another base model."""
        if self.base_digest not in {None, base.digest}:
            raise ConfigInvalid(
                f"train.startFrom {self.uri} was trained on a base model with the digest {self.base_digest}, but "
                f"{base.uri} has {base.digest}: set model.uri to that base model"
            )


def open_start_adapter(
    source: AdapterSource | None, environment: Environment, pin: str | None = None
) -> StartAdapter | None:
    """Return the adapter, or None without a source; download it to the workspace first if that was not done yet.

    `pin` comes from an earlier stage; None resolves the revision. Raise like `fetch_adapter`, and ConfigInvalid if it
    is no LoRA adapter.
    """
    if source is None:
        return None
    fetched = fetch_adapter(source.uri, environment, revision=source.revision, pin=pin)
    # Of both files: the configuration, such as the scaling, changes the model as much as the weights do.
    digest = digest_of_value(
        {name: digest_file(fetched.folder / name) for name in ADAPTER_FILES}
    )
    return StartAdapter(
        source.uri,
        fetched.folder,
        _read_config(source.uri, fetched.folder),
        digest,
        fetched.pin,
        _base_digest(fetched.folder),
    )


def _base_digest(folder: Path) -> object:
    """Return what train or push has written about the base model; None for an adapter of another program."""
    try:
        return json.loads((folder / MANIFEST).read_bytes())["about"].get("model")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _read_config(uri: str, folder: Path) -> dict[str, Any]:
    """Return adapter_config.json; raise ConfigInvalid if it is not of LoRA."""
    try:
        config = json.loads((folder / ADAPTER_FILES[0]).read_bytes())
        kind = config.get("peft_type")
    except (ValueError, AttributeError) as error:
        raise ConfigInvalid(
            f"train.startFrom {uri}: {ADAPTER_FILES[0]} cannot be read: {error}"
        ) from None
    if kind != "LORA":
        raise ConfigInvalid(
            f"train.startFrom {uri} is an adapter of kind {kind}: only LORA can be trained further"
        )
    return dict(config)
