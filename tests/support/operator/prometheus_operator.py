"""A real Prometheus Operator on this machine, and the configuration that it makes of the chart's objects."""

import base64
import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from support.operator.charts import Object
from support.programs import program, source
from support.stores.servers import LOOPBACK, free_port, running

from testcluster.kube import Kube
from testcluster.kube_namespace import KubeNamespace, until, wait_until_established

NAME = "prometheus-operator"
GROUP = "monitoring.coreos.com"
CRDS = f"example/prometheus-operator-crd/{GROUP}_*.yaml"
SERVER: Object = {
    "apiVersion": f"{GROUP}/v1",
    "kind": "Prometheus",
    "metadata": {"name": "platform"},
    # An empty selector selects every object of the namespace. Without replicas, only the configuration is made.
    "spec": {
        "replicas": 0,
        "serviceMonitorSelector": {},
        "podMonitorSelector": {},
        "ruleSelector": {},
    },
}


@contextmanager
def prometheus_operator(kube: Kube) -> Iterator[None]:
    """Create its CRDs, run it with the administrator's rights, and delete the CRDs at the end."""
    files = sorted(source(NAME).glob(CRDS))
    # The names of the files, because PyYAML cannot read an enumeration that has "=", as theirs do.
    names = [f"{file.stem.partition('_')[2]}.{GROUP}" for file in files]
    for file in files:
        kube.apply(file.read_text())
    try:
        wait_until_established(kube, *names)
        api = free_port()
        own = free_port()
        proxy = [
            str(kube.kubectl),
            f"--kubeconfig={kube.kubeconfig}",
            "proxy",
            f"--port={api}",
        ]
        options = [
            f"--apiserver=http://{LOOPBACK}:{api}",
            f"--web.listen-address={LOOPBACK}:{own}",
        ]
        with (
            running(proxy, api, {}),
            running([program(NAME), "--log-level=warn", *options], own, {}),
        ):
            yield
    finally:
        kube.run("delete", "--wait=false", "crd", *names)


@dataclass(frozen=True)
class Configuration:
    """What the Prometheus Operator makes for a server."""

    scrapes: list[Object]
    rules: list[Object]


def configuration(own: KubeNamespace, selected: list[Object]) -> Configuration:
    """Create monitors and rules, and a Prometheus that selects them; return the configuration that it gets.

    Raises TimedOut if a field is unknown or has a wrong type, and if the configuration lacks a monitor.
    """
    own.create(*selected, SERVER)
    monitors = [
        manifest for manifest in selected if manifest["kind"].endswith("Monitor")
    ]

    def made() -> Configuration | None:
        configuration = _configuration(own)
        return (
            configuration
            if len(configuration.scrapes) == len(monitors) and configuration.rules
            else None
        )

    result: Configuration = until(
        made, 60, "the Prometheus Operator has not selected every monitor and rule"
    )
    return result


def _configuration(own: KubeNamespace) -> Configuration:
    written = (
        own.get("secret", "prometheus-platform")
        .get("data", {})
        .get("prometheus.yaml.gz", "")
    )
    text = gzip.decompress(base64.b64decode(written)).decode() if written else "{}"
    # The reloader in the server's pod writes the number of its shard.
    server = yaml.safe_load(text.replace("$(SHARD)", "0"))
    files = own.get("configmap", "prometheus-platform-rulefiles-0").get("data", {})
    groups = [
        group for text in files.values() for group in yaml.safe_load(text)["groups"]
    ]
    return Configuration(
        server.get("scrape_configs") or [],
        [rule for group in groups for rule in group["rules"]],
    )


def from_here(scrape: Object, kubeconfig: Path) -> Object:
    """Return a scrape configuration for a server outside the cluster.

    It scrapes once an hour, so not in a test: the addresses of KWOK's pods may belong to other machines.
    """
    discoveries = [
        {**config, "kubeconfig_file": str(kubeconfig)}
        for config in scrape["kubernetes_sd_configs"]
    ]
    return {**scrape, "kubernetes_sd_configs": discoveries, "scrape_interval": "1h"}
