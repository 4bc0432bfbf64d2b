"""What a look at an object store and at a registry finds, before a pipeline starts."""

import pytest
from support.stores.registry_server import RegistryServer
from support.stores.sealed_model import SealedModel

from finetune_trainer.exit_codes import ExitCode
from finetune_trainer.stores.check import Item, look_at, look_at_all
from finetune_trainer.stores.objects.bucket import locate_objects
from finetune_trainer.stores.oci.store import RegistryTarget


def code_of(item: Item) -> ExitCode | None:
    """Return the exit code of the stage that would fail, or None."""
    problem = look_at(item)
    return problem.exit_code if problem else None


def test_objects_that_are_there_can_be_used(prefix, bucket):
    assert bucket.replace(locate_objects(f"{prefix}/base/config.json").key, b"{}", None)
    assert code_of(Item(f"{prefix}/base", "model")) is None
    assert code_of(Item(f"{prefix}/base/*.json", "dataset")) is None
    assert code_of(Item(f"{prefix}/published", "target")) is None
    assert code_of(Item(f"{prefix}/base", "target")) is ExitCode.CONFIG


def test_missing_objects_and_buckets_are_not_found(server, prefix):
    assert code_of(Item(f"{prefix}/base", "model")) is ExitCode.NOT_FOUND
    assert code_of(Item(f"{prefix}/*.jsonl", "dataset")) is ExitCode.NOT_FOUND
    assert (
        code_of(Item(f"{server.scheme}://no-such-bucket/models", "target"))
        is ExitCode.NOT_FOUND
    )


def test_wrong_key_is_found_for_sources_and_targets(server, prefix, monkeypatch):
    if not server.wrong_keys:
        pytest.skip("this server accepts all credentials")
    for name, value in server.wrong_keys[0].items():
        monkeypatch.setenv(name, value)
    assert code_of(Item(f"{prefix}/base", "model")) is ExitCode.CREDENTIALS
    assert code_of(Item(f"{prefix}/published", "target")) is ExitCode.CREDENTIALS


def test_server_that_is_gone_is_unavailable(server, prefix, monkeypatch):
    for name, value in server.gone.items():
        monkeypatch.setenv(name, value)
    (problem,) = look_at_all([Item(f"{prefix}/base", "model")], budget=2)
    assert problem is not None
    assert problem.exit_code is ExitCode.UNAVAILABLE


def test_images_of_a_registry_are_found_by_tag(
    registry: RegistryServer, model: SealedModel
):
    uri = f"oci://{registry.host}/team/model"
    assert code_of(Item(uri, "model")) is ExitCode.NOT_FOUND
    assert code_of(Item(uri, "target")) is None
    RegistryTarget(uri).publish(model.folder, model.digest, model.names)
    assert code_of(Item(uri, "dataset")) is None
    assert code_of(Item(uri, "target")) is None
    assert code_of(Item(f"{uri}:other", "dataset")) is ExitCode.NOT_FOUND
