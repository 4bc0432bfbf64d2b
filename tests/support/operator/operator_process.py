"""The operator's process as a ServiceAccount with exactly the rights and policies of the chart."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from support.operator.charts import Object, container, of_kind, pod

from testcluster.kube import Kube
from testcluster.kube_namespace import KubeNamespace, until

ROOT = Path(__file__).parents[3]
RIGHTS = (
    *("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"),
    *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
)
GROUP = "--api-group=finetune.dev"


def install_crd(kube: Kube) -> None:
    """Create the CRD, and wait until the API server serves it."""
    kube.apply((ROOT / "crds" / "finetunepipelines.yaml").read_text())
    until(lambda: "finetunepipelines" in kube.run("api-resources", GROUP), 30)


def credentials(
    own: KubeNamespace, folder: Path, account: str = "finetune-operator"
) -> Path:
    """Write a kubeconfig with a token of the operator's service account; return its path."""
    config = yaml.safe_load(own.kube.kubeconfig.read_text())
    token = own.run("create", "token", account).strip()
    config["users"] = [
        {
            "name": user["name"],
            "user": {"token": token},
        }
        for user in config["users"]
    ]
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    return file


def delete_objects(kube: Kube, objects: list[Object]) -> None:
    """Delete objects without waiting; some may be gone."""
    manifests = yaml.safe_dump_all(objects)
    kube.run("delete", "--ignore-not-found", "--wait=false", "-f", "-", given=manifests)


@contextmanager
def rights_granted(kube: Kube, objects: list[Object]) -> Iterator[None]:
    """Create the account, the RBAC objects and the policies of the chart, and delete them at the end."""
    rights = of_kind(objects, *RIGHTS)
    kube.apply(rights)
    try:
        yield
    finally:
        delete_objects(kube, rights)


@contextmanager
def running_operator(
    own: KubeNamespace,
    objects: list[Object],
    folder: Path,
    port: int = 0,
    checkout: Path = ROOT,
) -> Iterator[Path]:
    """Run a checkout's operator with the arguments and rights of the chart's objects; yield the path of its log.

    It serves /metrics on the port; 0: it serves nothing.
    """
    log = folder / "log"
    with rights_granted(own.kube, objects), log.open("wb") as output:
        account = pod(objects)["spec"]["serviceAccountName"]
        variables = {
            "KUBECONFIG": str(credentials(own, folder, account)),
            "POD_NAMESPACE": own.name,
            "POD_NAME": "replica",
        }
        command = [
            sys.executable,
            "-m",
            "finetune_operator",
            *container(objects)["args"],
            f"--port={port}",
        ]
        paths = os.pathsep.join(
            str(checkout / name) for name in ("operator", "trainer")
        )
        environment = {**os.environ, **variables, "PYTHONPATH": paths}
        with subprocess.Popen(
            command, env=environment, stdout=output, stderr=output
        ) as process:
            try:
                yield log
            finally:
                process.terminate()
