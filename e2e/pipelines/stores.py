"""Stores that the pods of a cluster reach: an S3 server and a hub on this machine, and the cluster's registry."""

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import obstore
from datasets import Dataset
from obstore.store import S3Store
from support.stores import servers
from support.stores.hub_server import serve_hub
from support.stores.hub_state import Hub

from testcluster.kube_namespace import KubeNamespace
from testcluster.provider import Provider

TOKEN = "hf_team"  # noqa: S105  of the hub on this machine
DATASET = "team/data"
DATA_FILE = "data/train-00000-of-00001.parquet"


@dataclass(frozen=True)
class Stores:
    """Running stores; the base model is in the bucket, and the training records are in a private data set."""

    bucket: Path
    """Folder with the objects of the bucket."""
    hub: Hub
    registry: str
    """host:port of the registry, which answers without TLS and without credentials."""
    environment: Mapping[str, str]
    """Addresses and credentials for the pods."""

    def uri(self, key: str) -> str:
        """Return the URI of a key in the bucket."""
        return f"s3://{servers.BUCKET}/{key}"


@contextmanager
def running_stores(
    cluster: Provider, namespace: KubeNamespace, folder: Path, material: Path
) -> Iterator[Stores]:
    """Run the stores with the demo's base model and records, which pods reach through the namespace."""
    nodes = node_addresses(cluster)
    address = address_of_host(nodes[0])
    hub = Hub(folder / "hub")
    (folder / "s3").mkdir()
    with servers.s3(folder / "s3", address) as s3, serve_hub(hub, address):
        upload_model(s3.environment, material / "base-model")
        add_dataset(hub, material / "data" / "train.jsonl")
        hub_port = open_to_pods(namespace, "hub", hub.url)
        # As on the public hub, large files have another host name than the API.
        hub.url, hub.storage_url = (f"http://{node}:{hub_port}" for node in nodes[:2])
        s3_url = f"http://{nodes[0]}:{open_to_pods(namespace, 's3', s3.environment['AWS_ENDPOINT_URL'])}"
        environment = {
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": TOKEN,
            "FINETUNE_INSECURE_REGISTRIES": cluster.registry,
        }
        environment |= {**s3.environment, "AWS_ENDPOINT_URL": s3_url}
        yield Stores(folder / "s3" / servers.BUCKET, hub, cluster.registry, environment)


def node_addresses(cluster: Provider) -> list[str]:
    """Return the address of each node."""
    addresses = (
        address
        for node in cluster.kube.json("get", "nodes")["items"]
        for address in node["status"]["addresses"]
    )
    return [
        address["address"] for address in addresses if address["type"] == "InternalIP"
    ]


def address_of_host(node: str) -> str:
    """Return the address under which a node reaches this machine."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((node, 9))  # sends nothing: it selects the address to send from
        return str(probe.getsockname()[0])


def open_to_pods(namespace: KubeNamespace, name: str, url: str) -> int:
    """Open a server of this machine to pods; return the port at which every node's address leads to it.

    This machine has no route to pods. The requests that a node port forwards come from the node's own address.
    """
    server = urlsplit(url)
    ports = [{"name": "http", "port": server.port}]
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": name}},
        "addressType": "IPv4",
        "ports": ports,
        "endpoints": [{"addresses": [server.hostname]}],
    }
    spec = {"type": "NodePort", "ports": ports}
    namespace.create(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": spec,
        },
        endpoints,
    )
    return int(namespace.get("service", name)["spec"]["ports"][0]["nodePort"])


def upload_model(environment: Mapping[str, str], folder: Path) -> None:
    """Upload the files of a model to the key base-model."""
    store = S3Store(
        servers.BUCKET,
        access_key_id=environment["AWS_ACCESS_KEY_ID"],
        secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region=environment["AWS_REGION"],
        endpoint=environment["AWS_ENDPOINT_URL"],
        client_options={"allow_http": True},
    )
    for path in folder.iterdir():
        obstore.put(store, f"base-model/{path.name}", path)


def add_dataset(hub: Hub, records: Path) -> None:
    """Add the records as a private data set with the split train, which only the holder of TOKEN may read."""
    parquet = records.with_suffix(".parquet")
    Dataset.from_json(str(records)).to_parquet(parquet)
    hub.add_token(TOKEN, "member", ("team",))
    hub.add_repository(
        DATASET, {DATA_FILE: parquet.read_bytes()}, kind="datasets", private=True
    )
