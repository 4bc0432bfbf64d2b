"""Which adapter serves which URI. To add a store, add its adapter and a line here."""

from typing import Literal

from finetune_trainer.contract import Environment, PushTarget
from finetune_trainer.contract.uris import ON_THIS_MACHINE, scheme_of
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.runtime.sources import locate
from finetune_trainer.stores.objects.bucket import OBJECT_STORES, WEB
from finetune_trainer.stores.port import StoreSource, StoreTarget

# The adapters are imported inside of the functions. A stage that reads local files loads no client of a store: each
# client takes a part of a second, and the client of an extra may not be installed.

Kind = Literal["model", "dataset"]


def open_source(
    uri: str,
    kind: Kind,
    *,
    revision: str | None = None,
    config: str | None = None,
    split: str | None = None,
) -> StoreSource | None:
    """Return the source that a URI names, or None if it names a path on this machine.

    Raise ConfigInvalid if the URI is invalid, or no store has its scheme.
    """
    scheme = scheme_of(uri)
    if scheme in ON_THIS_MACHINE:
        return None
    if scheme == "hf":
        from finetune_trainer.stores.hub.source import HubSource  # noqa: PLC0415

        return HubSource(uri, kind, revision, config=config, split=split)
    if scheme == "oci":
        from finetune_trainer.stores.oci.store import RegistrySource  # noqa: PLC0415

        return RegistrySource(uri)
    if scheme in OBJECT_STORES | WEB:
        from finetune_trainer.stores.objects.store import ObjectSource  # noqa: PLC0415

        return ObjectSource(uri)
    raise ConfigInvalid(
        f"{uri}: no store has the scheme {scheme}://; use hf, s3, gs, az, oci or pvc"
    )


def open_target(target: PushTarget, environment: Environment) -> StoreTarget:
    """Return the place to publish to.

    Raise ConfigInvalid like `open_source`, and SourceNotFound if the URI names a claim that is not mounted.
    """
    uri = target.uri
    scheme = scheme_of(uri)
    if scheme in ON_THIS_MACHINE:
        return _open_folder(uri, environment)
    if scheme == "hf":
        from finetune_trainer.stores.hub.target import HubTarget  # noqa: PLC0415

        return HubTarget(uri, private=target.private)
    if scheme == "oci":
        from finetune_trainer.stores.oci.store import RegistryTarget  # noqa: PLC0415

        return RegistryTarget(uri)
    if scheme in OBJECT_STORES:
        from finetune_trainer.stores.objects.store import ObjectTarget  # noqa: PLC0415

        return ObjectTarget(uri)
    raise ConfigInvalid(
        f"push.targets {uri}: nothing can be published to {scheme}://; use hf, s3, gs, az, oci or pvc"
    )


def _open_folder(uri: str, environment: Environment) -> StoreTarget:
    from finetune_trainer.stores.folders import FolderTarget  # noqa: PLC0415

    return FolderTarget(uri, locate(uri, environment))
