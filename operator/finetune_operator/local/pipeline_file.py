"""The one object of a work folder, kept in pipeline.json."""

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
    """Reads and writes the object; every write is whole and durable, or has not happened."""

    def __init__(self, workdir: Path) -> None:
        self.path = workdir / FILE

    def read(self) -> Pipeline | None:
        """Give the pipeline, or None in a fresh folder; raise ClusterError where the file is no pipeline."""
        try:
            found = json.loads(self.path.read_bytes())
            meta = found["metadata"]
            return Pipeline(
                key=Key(meta["namespace"], meta["name"]),
                uid=meta["uid"],
                generation=meta["generation"],
                resource_version=meta["resourceVersion"],
                annotations=meta["annotations"],
                spec=PipelineSpec.model_validate(found["spec"]),
                status=PipelineStatus.model_validate(found["status"]),
            )
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ClusterError(f"{self.path} cannot be read: {error}") from error
        except (ValueError, KeyError, TypeError, ValidationError) as error:
            raise ClusterError(
                f"{self.path} cannot be read ({error}); it was damaged or written by another version: "
                "use another --workdir, or remove this file (finished stages are found again in the workspace)"
            ) from error

    def apply(self, key: Key, spec: PipelineSpec, annotations: dict[str, str]) -> Pipeline:
        """Take over what a manifest says, as `kubectl apply` does; the generation grows where the spec differs.

        Raises ClusterError where the folder belongs to another pipeline.
        """
        before = self.read()
        if before is None:
            return self._write(Pipeline(key, str(uuid.uuid4()), 1, spec, annotations=annotations))
        if before.key != key:
            raise ClusterError(f"{self.path.parent} belongs to the pipeline {before.key}; use another --workdir")
        if before.spec == spec and before.annotations == annotations:
            return before
        generation = before.generation + (before.spec != spec)
        return self._write(replace(before, spec=spec, annotations=annotations, generation=generation))

    def write_status(self, pipeline: Pipeline, status: PipelineStatus) -> None:
        """Write the status; raise Conflict where the object has changed since it was read."""
        before = self.read()
        if before is None or before.resource_version != pipeline.resource_version:
            raise Conflict(f"{pipeline.key} has changed since it was read")
        if before.status != status:
            self._write(replace(before, status=status))

    def _write(self, pipeline: Pipeline) -> Pipeline:
        newer = replace(pipeline, resource_version=str(int(pipeline.resource_version or 0) + 1))
        write_durably(self.path, json.dumps(to_object(newer), indent=1).encode())
        return newer


def to_object(pipeline: Pipeline) -> dict[str, Any]:
    """Give the pipeline as Kubernetes would show it."""
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
        "status": pipeline.status.model_dump(mode="json", by_alias=True, exclude_none=True),
    }
