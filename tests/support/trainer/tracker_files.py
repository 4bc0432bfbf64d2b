"""What trackers wrote to files, read back by their formats."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Points = dict[str, list[tuple[int, float]]]
"""(step, value) by metric, in the order of the file."""

WANDB_SECONDS = 60
LEVELDB_BLOCK = 32768
LEVELDB_HEADER = 7
WANDB_HEADER = 7


def wandb_records(file: Path) -> Iterator[bytes]:
    """Yield the records of a .wandb file: LevelDB's log format after a header of 7 bytes."""
    data = file.read_bytes()
    position = WANDB_HEADER
    record = b""
    while position + LEVELDB_HEADER <= len(data):
        if LEVELDB_BLOCK - position % LEVELDB_BLOCK < LEVELDB_HEADER:
            position += LEVELDB_BLOCK - position % LEVELDB_BLOCK
            continue
        _checksum, length, kind = struct.unpack_from("<IHB", data, position)
        position += LEVELDB_HEADER
        record += data[position : position + length]
        position += length
        if kind in {1, 4}:  # full, or the last part
            yield record
            record = b""


def wandb_runs(folder: Path) -> list[dict[str, Any]]:
    """Return id, name, points, summary and files of each offline run below a folder."""
    from wandb.proto.wandb_internal_pb2 import Record  # noqa: PLC0415  takes seconds

    runs = []
    for file in sorted(folder.glob("offline-run-*/run-*.wandb")):
        run: dict[str, Any] = {"points": {}, "summary": {}, "finished": False}
        run["files"] = []
        for data in wandb_records(file):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "run":
                run.update(id=record.run.run_id, name=record.run.display_name)
            for item in record.history.item:
                if not (item.nested_key or [item.key])[0].startswith("_"):
                    name = ".".join(item.nested_key) or item.key
                    run["points"].setdefault(name, []).append(
                        (record.history.step.num, json.loads(item.value_json))
                    )
            for item in record.summary.update:
                run["summary"][".".join(item.nested_key) or item.key] = json.loads(
                    item.value_json
                )
            run["files"] += [item.path for item in record.files.files]
            run["finished"] = (
                run["finished"] or record.WhichOneof("record_type") == "exit"
            )
        runs.append(run)
    return runs


def finished_wandb_run(folder: Path) -> dict[str, Any]:
    """Return the only offline run below a folder. Wait until it is whole: a program of W&B writes it."""
    deadline = time.monotonic() + WANDB_SECONDS
    runs = wandb_runs(folder)
    while not runs or not runs[0]["finished"]:
        assert time.monotonic() < deadline, (
            f"the run is not finished after {WANDB_SECONDS} s: {runs}"
        )
        time.sleep(0.05)
        runs = wandb_runs(folder)
    [run] = runs
    return run


def event_points(folder: Path) -> Points:
    """Return the scalars in a folder of event files, as TensorBoard shows them: a purge removes what was before."""
    points: Points = {}
    for file in sorted(folder.glob("events.out.tfevents.*")):
        for event in _events(file):
            if event.HasField("session_log"):
                for name in points:
                    points[name] = [
                        point for point in points[name] if point[0] < event.step
                    ]
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    points.setdefault(value.tag, []).append(
                        (event.step, value.simple_value)
                    )
    return points


def _events(file: Path) -> Iterator[Any]:
    from tensorboardX.proto.event_pb2 import Event  # noqa: PLC0415

    data = file.read_bytes()
    position = 0
    while position + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, position)
        record = data[position + 12 : position + 12 + length]
        if len(record) < length:
            return  # torn by a kill
        yield Event.FromString(record)
        position += 12 + length + 4
