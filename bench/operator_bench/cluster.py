"""The control plane of one run: etcd, kube-apiserver, kube-controller-manager, scheduler, and kwok nodes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from finetune_operator.crd import generate
from operator_bench.api import NAMESPACE
from operator_bench.pipelines import preparations, service_account
from testcluster import fixtures
from testcluster.kube_namespace import until
from testcluster.provider import AUDIT_LOG, ControlPlaneOptions, Provider

KWOK_NODES = 10
ACCOUNTS = ("operator", "null", "observer", "user")
FLAGS: Mapping[str, Mapping[str, object]] = {
    "kube-controller-manager": {
        "concurrent-job-syncs": 50,
        "kube-api-qps": 500,
        "kube-api-burst": 1000,
    },
    "kube-scheduler": {"kube-api-qps": 500, "kube-api-burst": 1000},
}
"""Limits of the control plane, the same for every variant. With the defaults they would be measured instead."""
METADATA: Mapping[str, Any] = {
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}
CREATED = [
    {"group": "batch", "resources": ["jobs"]},
    {"group": "", "resources": ["persistentvolumeclaims"]},
]
BODIES: Mapping[str, Any] = {
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "Request", "verbs": ["create", "patch"], "resources": CREATED},
        {"level": "Metadata"},
    ],
}
"""Audit policy that also logs the bodies of new Jobs and claims."""


@dataclass(frozen=True)
class BenchCluster:
    """A cluster with the CRD, the namespace and a service account for each program of the benchmark."""

    provider: Provider
    folder: Path

    @property
    def audit_log(self) -> Path:
        """Return the path of the API server's audit log."""
        return self.provider.folder / AUDIT_LOG

    def kubeconfig(self, account: str) -> Path:
        """Return the kubeconfig of a service account."""
        return self.folder / f"{account}.kubeconfig"


@contextmanager
def cluster(
    folder: Path,
    policy: Mapping[str, Any] = METADATA,
    flags: Mapping[str, Mapping[str, object]] = FLAGS,
    kwok_nodes: int = KWOK_NODES,
) -> Iterator[BenchCluster]:
    """Create a fresh cluster and delete it at the end; `folder` gets the kubeconfigs."""
    options = ControlPlaneOptions(
        flags=flags, audit_policy=policy, provisions_volumes=False
    )
    with fixtures.cluster(
        "bench", "none", kwok_nodes=kwok_nodes, control_plane=options
    ) as provider:
        created = BenchCluster(provider, folder)
        kube = provider.kube
        # As the chart installs it.
        kube.apply([generate.definition(rules=False), *generate.rules_policy()])
        until(
            lambda: (
                "finetunepipelines"
                in kube.run("api-resources", "--api-group=finetune.dev")
            ),
            30,
        )
        kube.apply(
            [
                *preparations(),
                *(
                    manifest
                    for account in ACCOUNTS
                    for manifest in service_account(account)
                ),
            ]
        )
        until(
            lambda: kube.run(
                "-n", NAMESPACE, "get", "serviceaccount", "default", "-o", "name"
            ),
            30,
        )
        for account in ACCOUNTS:
            _write_credentials(created, account)
        yield created


def _write_credentials(created: BenchCluster, account: str) -> None:
    config = yaml.safe_load(created.provider.kubeconfig.read_text())
    kube = created.provider.kube
    token = kube.run(
        "-n", NAMESPACE, "create", "token", account, "--duration=24h"
    ).strip()
    config["users"] = [
        {"name": user["name"], "user": {"token": token}} for user in config["users"]
    ]
    created.kubeconfig(account).write_text(yaml.safe_dump(config))
