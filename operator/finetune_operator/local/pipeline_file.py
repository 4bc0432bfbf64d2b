"""The pipeline of a work folder, stored in pipeline.json."""

import json
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from finetune_operator.api.group import API_VERSION, KIND
from finetune_operator.api.spec import PipelineSpec
from finetune_operator.api.status import PipelineStatus
from finetune_operator.core.pipeline import Key, Pipeline
from finetune_operator.errors import ClusterError, Conflict
from finetune_trainer.files import write_durably

FILE = "pipeline.json"


class PipelineFile:
    """Reads and writes pipeline.json. Every write is atomic and durable."""

    def __init__(self, workdir: Path) -> None:
        self.path = workdir / FILE

    def read(self) -> Pipeline | None:
        """Return the pipeline, or None in a new work folder; raise ClusterError if the file is not a valid pipeline."""
        try:
            content = json.loads(self.path.read_bytes())
            meta = content["metadata"]
            return Pipeline(
                key=Key(meta["namespace"], meta["name"]),
                uid=meta["uid"],
                generation=meta["generation"],
                resource_version=meta["resourceVersion"],
                annotations=meta["annotations"],
                spec=PipelineSpec.model_validate(content["spec"]),
                status=PipelineStatus.model_validate(content["status"]),
            )
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
        previous = self.read()
        if previous is None:
            return self._write(
                Pipeline(key, str(uuid.uuid4()), 1, spec, annotations=annotations)
            )
        if previous.key != key:
            raise ClusterError(
                f"{self.path.parent} belongs to the pipeline {previous.key}; use another --workdir"
            )
        if previous.spec == spec and previous.annotations == annotations:
            return previous
        # As in Kubernetes, annotations do not count as an edit of the spec.
        generation = previous.generation + (previous.spec != spec)
        return self._write(
            replace(previous, spec=spec, annotations=annotations, generation=generation)
        )

    def write_status(self, pipeline: Pipeline, status: PipelineStatus) -> Pipeline:
        """Write the status and return the pipeline with it; raise Conflict if it has changed since it was read."""
        previous = self.read()
        # As the API server refuses a stale write: an edit since then would be lost.
        if previous is None or previous.resource_version != pipeline.resource_version:
            raise Conflict(f"{pipeline.key} has changed since it was read")
        if previous.status == status:
            return pipeline
        written = self._write(replace(previous, status=status))
        return replace(
            pipeline, status=status, resource_version=written.resource_version
        )

    def _write(self, pipeline: Pipeline) -> Pipeline:
        updated = replace(
            pipeline, resource_version=str(int(pipeline.resource_version or 0) + 1)
        )
        write_durably(self.path, json.dumps(to_object(updated), indent=1).encode())
        return updated


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
