"""An API server that is a dictionary: objects by their path, with a record of the writes."""

from copy import deepcopy
from typing import Any

from support.scenario import merged

from finetune_operator.kubernetes.translate.api_errors import AlreadyExists, ApiError

Object = dict[str, Any]


class FakeApi:
    """The verbs of KubernetesClient."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.rejected_creates: dict[str, ApiError] = {}
        """Part of a path -> the error of a create there."""
        self.rejected_patches: dict[str, ApiError] = {}
        """Part of a body -> the error of a patch or replace with it."""
        self.writes: list[str] = []
        self.reads: list[str] = []

    def put(self, path: str, found: Object) -> Object:
        """Store an object without recording a write, and return it with complete metadata."""
        collection, _, name = path.rpartition("/")
        meta = {"namespace": collection.split("/")[-2], "name": name, "uid": f"uid-of-{name}"}
        self.objects[path] = {**found, "metadata": {**meta, **found.get("metadata", {})}}
        return self.objects[path]

    async def get(self, path: str) -> Object | None:
        """Return a copy of an object; None where there is none."""
        self.reads.append(path)
        return deepcopy(self.objects.get(path))

    async def list(self, path: str, **_query: str) -> Any:
        """Yield copies of all objects of a collection; selectors are ignored."""
        for found in [one for where, one in self.objects.items() if where.startswith(f"{path}/")]:
            yield deepcopy(found)

    async def create(self, path: str, body: Object) -> Object:
        """Store an object. Raises the error of rejected_creates, or AlreadyExists."""
        where = f"{path}/{body['metadata']['name']}"
        for part, error in self.rejected_creates.items():
            if part in where:
                raise error
        if where in self.objects:
            raise AlreadyExists(409, "exists", "AlreadyExists")
        self.writes.append(f"create {where}")
        return deepcopy(self.put(where, body))

    async def patch(self, path: str, body: Object) -> Object:
        """Merge the body into an object. Raises the error of rejected_patches."""
        for part, error in self.rejected_patches.items():
            if part in str(body):
                self.writes.append(f"reject {path}")
                raise error
        self.writes.append(f"patch {path}")
        self.objects[path] = merged(self.objects[path], body)
        return deepcopy(self.objects[path])

    async def replace(self, path: str, body: Object) -> Object:
        """Replace the status, the only thing that the operator replaces. Raises the error of rejected_patches."""
        for part, error in self.rejected_patches.items():
            if part in str(body):
                raise error
        self.writes.append(f"replace {path}")
        where = path.removesuffix("/status")
        self.objects[where] = {**self.objects[where], "status": body["status"]}
        return deepcopy(self.objects[where])

    async def delete(self, path: str, propagation: str = "Background", uid: str | None = None) -> None:
        """Delete an object at once; with a uid, only the object of that uid."""
        found = self.objects.get(path)
        if found and uid in {None, found["metadata"]["uid"]}:
            self.writes.append(f"delete {path} {propagation}")
            del self.objects[path]
