"""Measure the transfer of a model to a store and back: our adapters beside other clients on the same server.

    python bench/transfer.py [--runs 5] [--stores s3 oci] [--megabytes 120 70] [--folder DIR]

It needs the programs versitygw and registry of testcluster, which are built when they are missing; boto3 and rclone,
which it installs in a virtual environment in the cache of testcluster, or goes on without; and three times the size of
the model on one disk. Servers and clients share the machine and that disk.

The model is a sealed folder of random bytes: weights of 120 and 70 MB, four small files and the manifest. Clients take
turns, after one turn that is not measured. Each turn has a new key, the disk is flushed before each transfer, and what
was fetched is compared with the model afterwards. The page cache is warm for all.

- ours: `publish` of the sealed folder and `fetch`, as in push and prepare. It compares the SHA-256 of each file that it
  fetches, flushes it to disk and seals the cache. In a registry it packs each file as a layer and computes its digest;
- ours without fsync: the same, and os.fsync does nothing. The difference is what durability costs;
- S3: obstore, boto3 and rclone with their defaults, four files at a time. None of them flushes. rclone compares MD5;
- OCI: requests, with PUT and GET of the same files as blobs, one or four at a time. It does not flush. It is told the
  digests and compares none; one variant computes the SHA-256 of what it sends and fetches.

Prints medians and, in brackets, minimum and maximum of the runs, and the ratio to the fastest other client. The goal
is 1.5 at most.
"""

import argparse
import filecmp
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "trainer"), str(ROOT / "tests")]

from support.stores import servers  # noqa: E402
from support.stores.registry_server import serve_registry  # noqa: E402
from support.stores.sealed_model import SealedModel  # noqa: E402

from finetune_trainer.runtime.artifacts import MANIFEST, digest_file, seal  # noqa: E402
from finetune_trainer.stores.objects.store import ObjectSource, ObjectTarget  # noqa: E402
from finetune_trainer.stores.oci.store import RegistrySource, RegistryTarget  # noqa: E402
from transfer_bench.clients import (  # noqa: E402
    Boto3Client,
    Client,
    ObstoreClient,
    OurClient,
    RcloneClient,
    RequestsClient,
    install_clients,
)

GOAL = 1.5
MEGABYTE = 10**6
SMALL_FILES = {"config.json": 1_000, "generation_config.json": 200, "tokenizer_config.json": 5_000}
TOKENIZER_BYTES = 9_000_000
OURS, UNFLUSHED = "ours", "ours without fsync"

Times = dict[tuple[str, str], list[float]]
"""Seconds of each run, by direction and client."""


@dataclass(frozen=True)
class Store:
    """A running server, its clients, and how to empty it."""

    name: str
    clients: Sequence[Client]
    empty: Callable[[], None]


def make_model(folder: Path, megabytes: Sequence[int]) -> SealedModel:
    """Write weights and small files of random bytes, and seal them."""
    weights = {
        f"model-{number}.safetensors": size * MEGABYTE for number, size in enumerate(megabytes, 1)
    }
    folder.mkdir()
    for name, size in (weights | {"tokenizer.json": TOKENIZER_BYTES} | SMALL_FILES).items():
        (folder / name).write_bytes(os.urandom(size))
    return SealedModel(folder, seal(folder, {"stage": "push"}))


@contextmanager
def s3(folder: Path) -> Iterator[Store]:
    """Run versitygw with its clients."""
    with ExitStack() as stack:
        server = stack.enter_context(servers.s3(folder))
        stack.enter_context(patch.dict(os.environ, server.environment))
        others: list[Client] = [ObstoreClient(servers.BUCKET)]
        if programs := install_clients():
            boto3 = stack.enter_context(closing(Boto3Client(programs, servers.BUCKET)))
            others += [boto3, RcloneClient(programs, servers.BUCKET)]
        yield Store(
            "S3",
            [*ours(server.uri("models"), ObjectTarget, ObjectSource), *others],
            lambda: _clear(folder),
        )


def _clear(folder: Path) -> None:
    for path in (folder / servers.BUCKET).iterdir():
        if not path.name.startswith("."):
            shutil.rmtree(path)


@contextmanager
def oci(folder: Path) -> Iterator[Store]:
    """Run a registry with its clients. Without its storage it has no blob that it need not be sent."""
    with (
        serve_registry(folder) as server,
        patch.dict(os.environ, {"DOCKER_CONFIG": str(folder / "no-docker")}),
    ):
        others = [RequestsClient(server.host, parallel) for parallel in (1, 4)]
        verifying = RequestsClient(server.host, 4, verifies=True)
        own = ours(f"oci://{server.host}/models", RegistryTarget, RegistrySource)
        yield Store("OCI", [*own, *others, verifying], lambda: shutil.rmtree(folder / "storage"))


def ours(base: str, target: type, source: type) -> list[Client]:
    """Return our client with fsync and without."""
    return [
        OurClient(OURS, base, target, source),
        OurClient(UNFLUSHED, base, target, source, is_durable=False),
    ]


STORES = {"s3": s3, "oci": oci}


def measure(store: Store, model: SealedModel, folder: Path, runs: int) -> Times:
    """Return the seconds of all runs but the first. Clients take turns, each run begins with another one."""
    times: Times = defaultdict(list)
    for run in range(runs + 1):
        for turn in range(len(store.clients)):
            client = store.clients[(run + turn) % len(store.clients)]
            sent, fetched = transfer(client, model, f"run{run}-{turn}", folder / "fetched")
            store.empty()
            if run:
                times["send", client.name].append(sent)
                times["fetch", client.name].append(fetched)
    return times


def transfer(client: Client, model: SealedModel, key: str, into: Path) -> tuple[float, float]:
    """Send and fetch a model once; return the seconds of both. Remove what was fetched."""
    into.mkdir()
    os.sync()
    start = time.perf_counter()
    client.send(model, key)
    sent = time.perf_counter() - start
    os.sync()
    start = time.perf_counter()
    found = client.fetch(key, into)
    fetched = time.perf_counter() - start
    different = [
        name
        for name in model.names
        if not filecmp.cmp(model.folder / name, found / name, shallow=False)
    ]
    assert not different, f"{client.name} fetched other bytes of {different}"
    shutil.rmtree(into)
    return sent, fetched


def report(store: Store, times: Times, size: int) -> None:
    """Print the times of each client, and the ratios of ours to the fastest other one."""
    for direction in ("send", "fetch"):
        medians = {
            client.name: statistics.median(times[direction, client.name])
            for client in store.clients
        }
        for name, seconds in medians.items():
            low, high = min(times[direction, name]), max(times[direction, name])
            rate = f"{size / MEGABYTE / seconds:,.0f} MB/s"
            print(
                f"{store.name:<4}{direction:<6}{name:<33}{seconds:6.2f} s ({low:.2f} to {high:.2f}), {rate}"
            )
        fastest = min(medians.keys() - {OURS, UNFLUSHED}, key=lambda name: medians[name])
        ratio, unflushed = medians[OURS] / medians[fastest], medians[UNFLUSHED] / medians[fastest]
        print(
            f"{store.name} {direction}: ours / {fastest}: {ratio:.2f} (goal {GOAL}), without fsync {unflushed:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5, help="measured turns of each client")
    parser.add_argument("--stores", choices=STORES, nargs="+", default=list(STORES))
    parser.add_argument(
        "--megabytes", type=int, nargs="+", default=(120, 70), help="size of each file of weights"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder on the disk to use; the one for temporary files by default",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        model = make_model(folder / "model", options.megabytes)
        files = [model.folder / name for name in (*model.names, MANIFEST)]
        size, start = sum(path.stat().st_size for path in files), time.perf_counter()
        for path in files:
            digest_file(path)
        print(
            f"{size / MEGABYTE:.0f} MB in {len(files)} files; SHA-256 of all: {time.perf_counter() - start:.2f} s"
        )
        for chosen in options.stores:
            (folder / chosen).mkdir()
            with STORES[chosen](folder / chosen) as store:
                report(store, measure(store, model, folder, options.runs), size)


if __name__ == "__main__":
    main()
