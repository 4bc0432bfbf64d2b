"""An API server that is a dictionary: objects by their path, with versions and a record of the requests."""

import asyncio
from copy import deepcopy
from typing import Any

from support.operator.scenario import merged

from finetune_operator.errors import Conflict
from finetune_operator.kubernetes.client import KubernetesClient
from finetune_operator.kubernetes.translate.api_errors import AlreadyExists, ApiError

Object = dict[str, Any]
PAGE = 2
"""Objects in one page of a list."""


class FakeApi(KubernetesClient):
    """The verbs of KubernetesClient."""

    def __init__(self) -> None:
        # Without the constructor of the client: there is no server.
        self.objects: dict[str, Object] = {}
        self.version = 100
        """The resource version of the newest write."""
        self.rejected_creates: dict[str, ApiError] = {}
        """Part of a path -> the error of a create there."""
        self.rejected_patches: dict[str, ApiError] = {}
        """Part of a body -> the error of a patch or replace with it."""
        self.rejected_deletes: dict[str, ApiError] = {}
        """Part of a path -> the error of a deletion there."""
        self.watches: dict[str, list[list[Object | Exception]]] = {}
        """Path -> what each watch of it yields or raises; a watch without an entry stays silent."""
        self.writes: list[str] = []
        self.reads: list[str] = []
        self.watched: list[tuple[str, str]] = []
        """Path and version of each watch."""

    def put(self, path: str, manifest: Object) -> Object:
        """Store an object as a new version, without recording a write, and return it with complete metadata."""
        collection, _, name = path.rpartition("/")
        self.version += 1
        known = {
            "namespace": collection.split("/")[-2],
            "name": name,
            "uid": f"uid-of-{name}",
        }
        meta = {
            **known,
            **manifest.get("metadata", {}),
            "resourceVersion": str(self.version),
        }
        self.objects[path] = {**manifest, "metadata": meta}
        return deepcopy(self.objects[path])

    async def get(self, path: str) -> Object | None:
        """Return a copy of an object; None if there is none."""
        self.reads.append(path)
        return deepcopy(self.objects.get(path))

    async def list(self, path: str, **query: str) -> Any:
        """Yield copies of the objects of a collection; selectors of labels are ignored."""
        async for page in self.pages(path, **query):
            for item in page["items"]:
                yield item

    async def pages(self, path: str, **query: str) -> Any:
        """Yield pages of the collection as it is now; selectors of labels are ignored."""
        self.reads.append(path)
        version = str(self.version)
        matching = [
            deepcopy(item)
            for key, item in self.objects.items()
            if key.startswith(f"{path}/")
        ]
        matching = [
            item
            for item in matching
            if is_selected(item, query.get("fieldSelector", ""))
        ]
        for start in range(0, len(matching) or 1, PAGE):
            yield {
                "metadata": {"resourceVersion": version},
                "items": matching[start : start + PAGE],
            }
            await asyncio.sleep(0)

    async def watch(
        self, path: str, resource_version: str, seconds: int, **query: str
    ) -> Any:
        """Yield the events that the test has put there for this watch."""
        self.watched.append((path, resource_version))
        streams = self.watches.get(path)
        if not streams:
            await asyncio.sleep(60)
            return
        for event in streams.pop(0):
            if isinstance(event, Exception):
                raise event
            yield deepcopy(event)

    async def create(self, path: str, body: Object, **query: str) -> Object:
        """Store an object. Raises the error of rejected_creates, or AlreadyExists."""
        key = f"{path}/{body['metadata']['name']}"
        for part, error in self.rejected_creates.items():
            if part in key:
                raise error
        if key in self.objects:
            raise AlreadyExists(409, "exists", "AlreadyExists")
        self.writes.append(f"create {key}")
        return self.put(key, body)

    async def patch(self, path: str, body: Object, **query: str) -> Object:
        """Merge the body into an object. Raises the error of rejected_patches."""
        for part, error in self.rejected_patches.items():
            if part in str(body):
                self.writes.append(f"reject {path}")
                raise error
        self.writes.append(f"patch {path}")
        key = path.removesuffix("/status")
        return self.put(key, merged(self.objects[key], body))

    async def replace(self, path: str, body: Object) -> Object:
        """Replace the status. Raises the error of rejected_patches, or Conflict if the object has changed."""
        for part, error in self.rejected_patches.items():
            if part in str(body):
                raise error
        key = path.removesuffix("/status")
        if key not in self.objects:
            raise ApiError(404, "not found", "NotFound")
        if (
            body["metadata"]["resourceVersion"]
            != self.objects[key]["metadata"]["resourceVersion"]
        ):
            raise Conflict("the object has been modified")
        self.writes.append(f"replace {path}")
        return self.put(key, {**self.objects[key], "status": body["status"]})

    async def delete(
        self,
        path: str,
        propagation: str = "Background",
        options: Object | None = None,
        **preconditions: str,
    ) -> None:
        """Delete an object at once. Raises the error of rejected_deletes, or Conflict if a precondition fails."""
        for part, error in self.rejected_deletes.items():
            if part in path:
                raise error
        stored = self.objects.get(path)
        if stored is None:
            return
        if any(
            stored["metadata"][name] != value for name, value in preconditions.items()
        ):
            raise Conflict("the precondition failed")
        self.writes.append(f"delete {path} {propagation}")
        self.version += 1
        del self.objects[path]


def is_selected(item: Object, selector: str) -> bool:
    """Return whether a selector of fields matches a pipeline, a Job or a pod."""
    status = item.get("status") or {}
    fields = {
        "status.successful": str(status.get("succeeded", 0)),
        "status.phase": status.get("phase", ""),
        "status.finishedAt": status.get("finishedAt", ""),
    }
    terms = [
        term.replace("!=", "=!").split("=", 1) for term in selector.split(",") if term
    ]
    for name, value in terms:
        if value.startswith("!"):
            if fields.get(name) == value[1:]:
                return False
        elif fields.get(name) not in {None, value}:
            return False
    return True
