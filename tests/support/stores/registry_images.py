"""Models as images of a registry."""

import hashlib
import io
import json
import tarfile

from support.stores.registry_server import RegistryServer
from support.stores.sealed_model import SealedModel

from finetune_trainer.stores.oci.image import MANIFEST_TYPE
from finetune_trainer.stores.oci.store import RegistryTarget
from finetune_trainer.stores.port import Publication

REPOSITORY = "team/model"


def publish(host: str, model: SealedModel, tag: str = "") -> Publication:
    return RegistryTarget(f"oci://{host}/{REPOSITORY}{tag}").publish(
        model.folder, model.digest, model.names
    )


def image(registry: RegistryServer, reference: str) -> dict:
    status, body = registry.get(
        f"/v2/{REPOSITORY}/manifests/{reference}", MANIFEST_TYPE
    )
    assert status == 200
    return json.loads(body)


def unpacked(registry: RegistryServer, reference: str = "latest") -> dict[str, bytes]:
    """Return the files of an image, as a container runtime unpacks its layers."""
    files = {}
    for layer in image(registry, reference)["layers"]:
        content = registry.get(f"/v2/{REPOSITORY}/blobs/{layer['digest']}")[1]
        assert f"sha256:{hashlib.sha256(content).hexdigest()}" == layer["digest"]
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for entry in archive:
                assert (entry.uid, entry.gid, entry.mode, entry.mtime) == (
                    0,
                    0,
                    0o644,
                    0,
                )
                file = archive.extractfile(entry)
                assert file
                files[entry.name] = file.read()
    return files
