"""A published model as an image volume: the kubelet pulls it by its digest, and a pod reads its files."""

from pathlib import Path

import pytest
from support.stores.sealed_model import make_model

from finetune_trainer.runtime.artifacts import MANIFEST, digest_file
from finetune_trainer.stores.oci.image import MODEL_FOLDER
from finetune_trainer.stores.oci.store import RegistryTarget
from testcluster.kube_namespace import KubeNamespace, pod
from testcluster.provider import Provider


def test_published_model_is_mounted_in_a_pod(
    cluster: Provider,
    namespace: KubeNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("FINETUNE_INSECURE_REGISTRIES", cluster.registry)
    model = make_model(tmp_path / "model")
    uri = (
        RegistryTarget(f"oci://{cluster.registry}/team/model")
        .publish(model.folder, model.digest, model.names)
        .uri
    )
    reader = pod(
        "reader", "cd /model && busybox find . -type f -exec busybox sha256sum {} +"
    )
    reader["spec"]["volumes"].append(
        {"name": "model", "image": {"reference": uri.removeprefix("oci://")}}
    )
    mount = {"name": "model", "mountPath": "/model", "subPath": MODEL_FOLDER}
    reader["spec"]["containers"][0]["volumeMounts"].append(mount)
    namespace.create(reader)
    assert (
        namespace.wait_phase("reader", "Succeeded", "Failed", seconds=90) == "Succeeded"
    ), namespace.run("logs", "reader")
    expected = {
        f"{digest_file(model.folder / name)}  ./{name}"
        for name in [*model.names, MANIFEST]
    }
    assert set(namespace.run("logs", "reader").splitlines()) == expected
