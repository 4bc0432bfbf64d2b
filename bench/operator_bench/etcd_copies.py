"""Copy the objects of one pipeline in etcd: `python -m operator_bench.etcd_copies NAMESPACE NAME COUNT UID…`.

It runs in the network of the control plane. An API server would need ten minutes for 20,000 pipelines. Names and uids
have the same length in all copies, so that they are replaced in the bytes of an object, which is JSON or protobuf.
"""

import base64
import json
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

ETCD = "http://127.0.0.1:2379/v3/kv"
RESOURCES = ("finetune.dev/finetunepipelines", "jobs", "persistentvolumeclaims")
OBJECTS_AT_ONCE = 60
"""Puts in a transaction; etcd accepts 128, and 1.5 MB."""
UID_DIGITS = 8
Object = dict[str, Any]


def send(verb: str, body: Object) -> Object:
    """Send a request to etcd's JSON gateway."""
    request = urllib.request.Request(  # noqa: S310  a fixed address
        f"{ETCD}/{verb}", json.dumps(body).encode()
    )
    with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
        answer: Object = json.load(response)
    return answer


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def objects_of(namespace: str, name: str) -> Iterator[tuple[bytes, bytes]]:
    """Yield key and value of the pipeline's objects, the pipeline last: nothing misses its children."""
    for resource in reversed(RESOURCES):
        begin = f"/registry/{resource}/{namespace}/{name}".encode()
        after = begin[:-1] + bytes([begin[-1] + 1])
        answer = send("range", {"key": encoded(begin), "range_end": encoded(after)})
        for pair in answer.get("kvs", ()):
            yield base64.b64decode(pair["key"]), base64.b64decode(pair["value"])


def copies(
    originals: list[tuple[bytes, bytes]], name: str, uids: list[str], count: int
) -> Iterator[tuple[bytes, bytes]]:
    """Yield key and value of each object of each copy; the copies are numbered from 1."""
    for number in range(1, count + 1):
        changes = {name.encode(): f"{name[:-6]}{number:06d}".encode()}
        for index, uid in enumerate(uids):
            digits = f"{index:02x}{number:06x}"
            changes[uid[:UID_DIGITS].encode()] = digits.encode()
        for pair in originals:
            yield _replaced(pair[0], changes), _replaced(pair[1], changes)


def _replaced(content: bytes, changes: dict[bytes, bytes]) -> bytes:
    for old, new in changes.items():
        content = content.replace(old, new)
    return content


def main() -> None:
    namespace, name, count, *uids = sys.argv[1:]
    originals = list(objects_of(namespace, name))
    batch: list[Object] = []
    for key, value in copies(originals, name, uids, int(count)):
        put = {"key": encoded(key), "value": encoded(value)}
        batch.append({"request_put": put})
        if len(batch) == OBJECTS_AT_ONCE:
            send("txn", {"success": batch})
            batch = []
    if batch:
        send("txn", {"success": batch})
    print(len(originals))


if __name__ == "__main__":
    main()
