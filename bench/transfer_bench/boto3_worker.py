"""`python boto3_worker.py BUCKET PARALLEL`: send and fetch folders with boto3, as its input says.

Each line of the input is a JSON list: "send" or "fetch", a folder and a key. It prints `done` for each.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3


def send(client, bucket, threads, folder, key):  # noqa: ANN001, ANN201  boto3 has no types
    """Upload all files of a folder."""
    list(
        threads.map(
            lambda path: client.upload_file(path, bucket, f"{key}/{path.name}"),
            Path(folder).iterdir(),
        )
    )


def fetch(client, bucket, threads, folder, key):  # noqa: ANN001, ANN201
    """Download all objects below a key to a folder."""
    keys = [
        found["Key"]
        for found in client.list_objects_v2(Bucket=bucket, Prefix=f"{key}/")["Contents"]
    ]
    list(
        threads.map(
            lambda name: client.download_file(bucket, name, str(Path(folder) / Path(name).name)),
            keys,
        )
    )


def main() -> None:
    bucket, parallel = sys.argv[1:]
    client = boto3.client("s3")
    with ThreadPoolExecutor(int(parallel)) as threads:
        for line in sys.stdin:
            action, folder, key = json.loads(line)
            {"send": send, "fetch": fetch}[action](client, bucket, threads, folder, key)
            print("done", flush=True)


if __name__ == "__main__":
    main()
