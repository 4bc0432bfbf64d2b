"""An API server that is a dictionary: objects by their path, for what the operator does to a cluster."""

from copy import deepcopy
from typing import Any

from support.scenario import merged

from finetune_operator.kubernetes.client import AlreadyExists, ApiError

Object = dict[str, Any]


class FakeApi:
    """The verbs of Api; `refuse` names paths that cannot be created, and why."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.reject: dict[str, ApiError] = {}
        self.unchangeable: dict[str, ApiError] = {}
        """Words in a patch that is refused, and why."""
        self.writes: list[str] = []
        self.read: list[str] = []

    def put(self, path: str, found: Object) -> Object:
        """Let an object be there."""
        collection, _, name = path.rpartition("/")
        meta = {"namespace": collection.split("/")[-2], "name": name, "uid": f"uid-of-{name}"}
        self.objects[path] = {**found, "metadata": {**meta, **found.get("metadata", {})}}
        return self.objects[path]

    async def get(self, path: str) -> Object | None:
        """Give a copy."""
        self.read.append(path)
        return deepcopy(self.objects.get(path))

    async def list(self, path: str, **_query: str) -> Any:
        """Give nothing: what is to be found is in the books."""
        for found in [one for where, one in self.objects.items() if where.startswith(f"{path}/")]:
            yield deepcopy(found)

    async def create(self, path: str, body: Object) -> Object:
        """Refuse what is to be refused and what is there."""
        where = f"{path}/{body['metadata']['name']}"
        for part, error in self.reject.items():
            if part in where:
                raise error
        if where in self.objects:
            raise AlreadyExists(409, "there", "AlreadyExists")
        self.writes.append(f"create {where}")
        return deepcopy(self.put(where, body))

    async def patch(self, path: str, body: Object) -> Object:
        """Merge, unless it is refused."""
        for words, error in self.unchangeable.items():
            if words in str(body):
                self.writes.append(f"refuse {path}")
                raise error
        self.writes.append(f"patch {path}")
        self.objects[path] = merged(self.objects[path], body)
        return deepcopy(self.objects[path])

    async def replace(self, path: str, body: Object) -> Object:
        """Take the status, which is all that is replaced."""
        for words, error in self.unchangeable.items():
            if words in str(body):
                raise error
        self.writes.append(f"replace {path}")
        where = path.removesuffix("/status")
        self.objects[where] = {**self.objects[where], "status": body["status"]}
        return deepcopy(self.objects[where])

    async def delete(self, path: str, propagation: str = "Background", uid: str | None = None) -> None:
        """Delete at once; with a uid only that very one."""
        found = self.objects.get(path)
        if found and uid in {None, found["metadata"]["uid"]}:
            self.writes.append(f"delete {path} {propagation}")
            del self.objects[path]
