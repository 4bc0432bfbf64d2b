"""Requests of an account to every resource of an API server, with no object behind them."""

import json
import ssl
import urllib.error
import urllib.request
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
Right = tuple[str, str, str]
"""Group, resource with its subresource, verb."""
METHODS = {
    "get": "GET",
    "list": "GET",
    "watch": "GET",
    "create": "POST",
    "update": "PUT",
    "patch": "PATCH",
    "delete": "DELETE",
    "deletecollection": "DELETE",
}
NAMELESS = {"list", "watch", "create", "deletecollection"}
"""Verbs of a collection."""
FORBIDDEN = 403


@dataclass(frozen=True)
class Resource:
    """A resource or a subresource that the API server has."""

    group: str
    version: str
    name: str
    verbs: tuple[str, ...]
    is_namespaced: bool

    def path(self, verb: str, namespace: str, name: str) -> str:
        """Return the path of a request about an object."""
        root = f"/apis/{self.group}" if self.group else "/api"
        resource, _, subresource = self.name.partition("/")
        parts = [root, self.version]
        if self.is_namespaced:
            parts += ["namespaces", namespace]
        parts.append(resource)
        if subresource or verb not in NAMELESS:
            parts.append(name)
        if subresource:
            parts.append(subresource)
        return "/".join(parts)


class Thief:
    """Sends requests with the rights of an account; without an account, with the rights of an administrator."""

    def __init__(self, kubeconfig: Path, account: str, folder: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        user = config["users"][0]["user"]
        self.server = cluster["server"]
        self.account = account
        files = {}
        for name, fields in (
            ("certificate-authority", cluster),
            *((name, user) for name in ("client-certificate", "client-key")),
        ):
            files[name] = _file(name, fields, folder)
        self.context = ssl.create_default_context(cafile=files["certificate-authority"])
        self.context.load_cert_chain(files["client-certificate"], files["client-key"])

    def send(
        self, method: str, path: str, body: Object | None = None
    ) -> tuple[int, Object]:
        """Return status and body of the answer."""
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.server + path, content, method=method)
        kind = (
            "application/merge-patch+json" if method == "PATCH" else "application/json"
        )
        request.add_header("Content-Type", kind)
        if self.account:
            # The API server adds the groups of a ServiceAccount itself.
            request.add_header("Impersonate-User", self.account)
        try:
            with urllib.request.urlopen(request, context=self.context) as answer:
                return answer.status, _parsed(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, _parsed(error.read())

    def resources(self) -> Iterator[Resource]:
        """Yield each resource and subresource of each group, in the version that the API server prefers."""
        groups = self.send("GET", "/apis")[1]["groups"]
        versions = [("", "v1", "/api/v1")]
        for group in groups:
            version = group["preferredVersion"]
            versions.append(
                (group["name"], version["version"], f"/apis/{version['groupVersion']}")
            )
        for group_name, version_name, path in versions:
            for resource in self.send("GET", path)[1]["resources"]:
                yield Resource(
                    group_name,
                    version_name,
                    resource["name"],
                    tuple(resource["verbs"]),
                    resource["namespaced"],
                )

    def may(self, resource: Resource, verb: str, namespace: str, name: str) -> bool:
        """Return whether the API server lets the account send a request, whatever becomes of it."""
        query = {
            "watch": "?watch=true&timeoutSeconds=1",
            "list": "?limit=1",
            "get": "",
        }.get(verb, "?dryRun=All")
        # Rights on a named object include lists of it alone.
        if resource.name in {"configmaps", "leases"} and verb in {"list", "watch"}:
            query += f"&fieldSelector=metadata.name%3D{name}"
        path = resource.path(verb, namespace, name) + query
        # Nothing is valid about the body: rights are checked before it is read.
        body: Object | None = {} if verb in {"create", "update", "patch"} else None
        status, answer = self.send(METHODS[verb], path, body)
        return not (status == FORBIDDEN and "cannot" in str(answer.get("message")))


def _file(name: str, fields: Object, folder: Path) -> str:
    """Return the path of a certificate or a key, which a kubeconfig may have inside."""
    if name in fields:
        return str(fields[name])
    path = folder / name
    path.write_bytes(b64decode(fields[f"{name}-data"]))
    return str(path)


def _parsed(content: bytes) -> Object:
    try:
        answer = json.loads(content)
    except ValueError:
        return {"message": content.decode(errors="replace")}
    return answer if isinstance(answer, dict) else {}
