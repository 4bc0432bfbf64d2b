"""The pipeline of a work folder, stored in pipeline.json."""

import contextlib
import fcntl
import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from finetune_operator.api.group import API_VERSION, KIND
from finetune_operator.api.rules import STORED
from finetune_operator.api.spec import PipelineSpec
from finetune_operator.api.status import PipelineStatus
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.errors import ClusterError, Conflict
from finetune_operator.local.applied import Fields, fields_of, with_fields
from finetune_trainer.files import write_durably

FILE = "pipeline.json"
WRITE_LOCK = "pipeline.lock"
"""File that a process locks while it changes the pipeline."""
APPLIED = "applied"
"""Key of the fields that the manifest has set."""


class PipelineFile:
    """Reads and writes pipeline.json. Every write is atomic and durable."""

    def __init__(self, workdir: Path) -> None:
        self.path = workdir / FILE

    def read(self) -> Pipeline | None:
        """Return the pipeline, or None in a new work folder; raise ClusterError if the file is not a valid pipeline."""
        stored = self._read()
        return stored[0] if stored else None

    def _read(self) -> tuple[Pipeline, Fields] | None:
        """Return the pipeline, and the fields that its manifest has set; None in a new work folder."""
        try:
            content = json.loads(self.path.read_bytes())
            meta = content["metadata"]
            pipeline = Pipeline(
                key=Key(meta["namespace"], meta["name"]),
                uid=meta["uid"],
                generation=meta["generation"],
                resource_version=meta["resourceVersion"],
                annotations=meta["annotations"],
                spec=PipelineSpec.model_validate(content["spec"], context=STORED),
                status=PipelineStatus.model_validate(content["status"]),
            )
            # A file of an earlier version lacks them: then each stored field counts as set.
            return pipeline, content.get(APPLIED, content["spec"])
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ClusterError(f"cannot read {self.path}: {error}") from error
        except (ValueError, KeyError, TypeError, ValidationError) as error:
            raise ClusterError(
                f"cannot read {self.path}: {error}; it may be damaged, or written by another version: "
                "use another --workdir, or remove this file (finished stages are found again in the workspace)"
            ) from error

    def apply(
        self, key: Key, spec: PipelineSpec, annotations: dict[str, str]
    ) -> Pipeline:
        """Store a manifest's spec and annotations, as `kubectl apply` does; a new spec increments the generation.

        Raises ClusterError if the work folder belongs to another pipeline.
        """
        applied = fields_of(spec)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._changing():
            stored = self._read()
            if stored is None:
                new = Pipeline(key, str(uuid.uuid4()), 1, spec, annotations=annotations)
                return self._write(new, applied)
            previous, before = stored
            if previous.key != key:
                raise ClusterError(
                    f"{self.path.parent} belongs to the pipeline {previous.key}; use another --workdir"
                )
            edited = _edited(previous, before, spec, annotations)
            if edited == previous and applied == before:
                return previous
            return self._write(edited, applied)

    def change(self, edit: Callable[[Pipeline], Pipeline]) -> Pipeline | None:
        """Store what `edit` makes of the pipeline, as `kubectl patch` does; return it, or None without a pipeline."""
        with self._changing():
            stored = self._read()
            if stored is None:
                return None
            previous, applied = stored
            edited = edit(previous)
            if edited == previous:
                return previous
            generation = previous.generation + (previous.spec != edited.spec)
            return self._write(replace(edited, generation=generation), applied)

    def edited(
        self, spec: PipelineSpec, annotations: dict[str, str]
    ) -> Pipeline | None:
        """Return the stored pipeline as it would be after `apply`; None in a new work folder."""
        stored = self._read()
        return _edited(*stored, spec, annotations) if stored else None

    def write_status(self, pipeline: Pipeline, status: PipelineStatus) -> Pipeline:
        """Write the status and return the pipeline with it; raise Conflict if it has changed since it was read."""
        with self._changing():
            stored = self._read()
            version = stored[0].resource_version if stored else None
            # As the API server refuses a stale write: an edit since then would be lost.
            if stored is None or version != pipeline.resource_version:
                raise Conflict(f"{pipeline.key} has changed since it was read")
            previous, applied = stored
            if previous.status == status:
                return pipeline
            written = self._write(replace(previous, status=status), applied)
        return replace(
            pipeline, status=status, resource_version=written.resource_version
        )

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Keep other processes from changing the pipeline: a request of `finetune cancel` must not be lost."""
        with (self.path.parent / WRITE_LOCK).open("w") as lock:
            # The kernel releases this lock if the process is killed.
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _write(self, pipeline: Pipeline, applied: Fields) -> Pipeline:
        updated = replace(
            pipeline, resource_version=str(int(pipeline.resource_version or 0) + 1)
        )
        content = {**to_object(updated), APPLIED: applied}
        write_durably(self.path, json.dumps(content, indent=1).encode())
        return updated


def _edited(
    previous: Pipeline, before: Fields, spec: PipelineSpec, annotations: dict[str, str]
) -> Pipeline:
    merged = with_fields(previous.spec, before, spec)
    # `finetune suspend` holds only until the manifest is run again, unless the manifest itself asks for it.
    spec = merged.model_copy(update={"suspend": spec.suspend})
    # As in Kubernetes, annotations do not count as an edit of the spec.
    generation = previous.generation + (previous.spec != spec)
    return replace(previous, spec=spec, annotations=annotations, generation=generation)


def to_object(pipeline: Pipeline) -> dict[str, Any]:
    """Return the pipeline as the object that a Kubernetes API server would return."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": pipeline.key.name,
            "namespace": pipeline.key.namespace,
            "uid": pipeline.uid,
            "generation": pipeline.generation,
            "resourceVersion": pipeline.resource_version,
            "annotations": pipeline.annotations,
        },
        "spec": pipeline.spec.model_dump(mode="json", by_alias=True, exclude_none=True),
        "status": pipeline.status.model_dump(
            mode="json", by_alias=True, exclude_none=True
        ),
    }
