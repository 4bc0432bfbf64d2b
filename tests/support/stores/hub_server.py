"""A strict Hugging Face hub on this machine: the API, LFS uploads and downloads of two host names.

`python -m support.stores.hub_server --port PORT --folder FOLDER` serves a state that other processes prepare with
`Hub`. Files of LFS are served under localhost, everything else under 127.0.0.1: a redirect changes the host name.
`hub.url` and `hub.storage_url` name other hosts if clients reach the server under other addresses.
"""

import argparse
import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from support.stores import hub_api as api
from support.stores.hub_connection import Cut, HubConnection
from support.stores.hub_state import Hub, Refused, Repository
from support.stores.hub_xet import Permission

LOOPBACK = "127.0.0.1"
XET_HEADERS = ("X-Xet-Access-Token", "X-Xet-Token-Expiration", "X-Xet-Cas-Url")


class HubHandler(HubConnection):
    """Routes each request to the part of the API that answers it."""

    def answer(self) -> None:
        if self.hub.faults.down:
            raise Refused(503, "", "Service Unavailable")
        url = urlsplit(self.path)
        host = (self.headers["Host"] or "").split(":")[0]
        self.query = url.query
        parts = url.path.strip("/").split("/")
        if parts[0] == "storage":
            self.answer_storage(host, parts)
            return
        self.access = api.authenticate(self.hub, self.headers["Authorization"])
        if host != urlsplit(self.hub.url).hostname:
            raise Refused(421, "", "this host name serves files only")
        if parts[0] == "api":
            self.answer_api([unquote(part) for part in parts[1:]])
        else:
            self.answer_repository([unquote(part) for part in parts])

    def answer_api(self, parts: list[str]) -> None:
        match self.command, parts:
            case "GET", ["whoami-v2"]:
                self.send_json(api.whoami(self.access))
            case "POST", ["repos", "create"]:
                with self.lock:
                    status, answer = api.create(self.hub, self.access, self.read_json())
                self.send_json(answer, status)
            case "POST", ["validate-yaml"]:
                errors = api.yaml_errors(self.read_json()["content"])
                self.send_json(
                    {"errors": errors, "warnings": []}, 400 if errors else 200
                )
            case "GET", [("models" | "datasets") as kind, organization, name, *rest]:
                self.answer_reading(
                    api.visible(self.hub, f"{organization}/{name}", kind, self.access),
                    rest,
                )
            case "POST", [
                ("models" | "datasets") as kind,
                organization,
                name,
                action,
                revision,
            ]:
                repository = api.visible(
                    self.hub, f"{organization}/{name}", kind, self.access
                )
                self.answer_writing(repository, action, revision)
            case _:
                raise Refused(501, "", f"{self.command} {self.path} is not of this hub")

    def answer_reading(self, repository: Repository, rest: list[str]) -> None:
        match rest:
            case []:
                self.send_json(api.description(repository, "main"))
            case ["revision", revision]:
                self.send_json(api.description(repository, revision))
            case [("xet-read-token" | "xet-write-token") as route, revision]:
                repository.resolve(revision)
                permission: Permission = (
                    "write" if route == "xet-write-token" else "read"
                )
                token = api.xet_token(self.hub, repository, self.access, permission)
                self.send_json(
                    token,
                    headers=dict(
                        zip(XET_HEADERS, map(str, token.values()), strict=True)
                    ),
                )
            case ["refs"]:
                self.send_json(api.refs(repository))
            case ["tree", revision, *below]:
                page, more = api.tree_page(
                    repository, revision, "/".join(below), self.query
                )
                address = f"{self.hub.url}{urlsplit(self.path).path}"
                self.send_json(
                    page,
                    headers={"Link": f'<{address}?{more}>; rel="next"'} if more else {},
                )
            case _:
                raise Refused(501, "", f"GET {self.path} is not of this hub")

    def answer_writing(
        self, repository: Repository, action: str, revision: str
    ) -> None:
        if action == "paths-info":
            self.send_json(api.paths_info(repository, revision, self.read_body()))
            return
        body = self.read_body()
        api.check_writable(repository.name, self.access)
        match action:
            case "preupload":
                self.send_json(api.preupload(repository, revision, json.loads(body)))
            case "commit":
                self.answer_commit(repository, revision, body)
            case "tag" | "branch":
                with self.lock:
                    (api.tag if action == "tag" else api.branch)(
                        repository, revision, json.loads(body)
                    )
                self.send_json({})
            case _:
                raise Refused(501, "", f"POST {self.path} is not of this hub")

    def answer_commit(self, repository: Repository, branch: str, body: bytes) -> None:
        if self.headers["Content-Type"] != "application/x-ndjson":
            raise Refused(400, "", "a commit is application/x-ndjson")
        with self.lock:
            answer, self.received = api.commit(repository, branch, body)
        if self.hub.faults.lose_commit_answer:
            raise Cut
        self.send_json(answer)

    def answer_repository(self, parts: list[str]) -> None:
        """Answer what lies beside the API: LFS batches, and files by revision."""
        kind = parts.pop(0) if parts[0] == "datasets" else "models"
        match self.command, parts:
            case "POST", [organization, name, "info", "lfs", "objects", action] if (
                name.endswith(".git")
            ):
                repository = api.visible(
                    self.hub,
                    f"{organization}/{name.removesuffix('.git')}",
                    kind,
                    self.access,
                )
                self.answer_lfs(repository, action, self.read_json())
            case (("GET" | "HEAD"), [organization, name, "resolve", revision, *below]):
                repository = api.visible(
                    self.hub, f"{organization}/{name}", kind, self.access
                )
                self.answer_file(repository, revision, "/".join(below))
            case _:
                raise Refused(501, "", f"{self.command} {self.path} is not of this hub")

    def answer_lfs(
        self, repository: Repository, action: str, body: dict[str, Any]
    ) -> None:
        api.check_writable(repository.name, self.access)
        if action == "batch":
            if self.headers["Content-Type"] != api.LFS_TYPE:
                raise Refused(415, "", f"a batch is {api.LFS_TYPE}")
            self.send_json(api.batch(repository, body, self.hub.storage_url))
            return
        if not repository.has_object(body["oid"], body["size"]):
            raise Refused(404, "", f"there is no LFS object {body['oid']} of this size")
        self.send_json({"success": True})

    def answer_file(self, repository: Repository, revision: str, name: str) -> None:
        """Send a small file, or redirect to the storage host."""
        api.check_readable(repository, self.access)
        commit = repository.resolve(revision)
        entry = repository.tree(commit).get(name)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{entry.etag}"' if entry else ""}
        if entry is None:
            raise Refused(404, "EntryNotFound", f"Entry not found: {name}")
        self.file = name
        if entry.sha256 is None:
            self.send_file(repository.content_path(entry), headers)
            return
        query = f"signature={api.signature(entry.sha256)}&name={name}"
        location = f"{self.hub.storage_url}/storage/{repository.kind}/{repository.name}/{entry.sha256}?{query}"
        linked = {
            "X-Linked-Etag": f'"{entry.sha256}"',
            "X-Linked-Size": str(entry.size),
            "Location": location,
        }
        self.send_empty(
            302,
            headers | linked | api.xet_link(self.hub, repository, entry.sha256, commit),
        )

    def answer_storage(self, host: str, parts: list[str]) -> None:
        """Answer as an object store does: a signed URL, never a second way to authenticate."""
        _, kind, organization, name, oid = parts
        options = {key: values[0] for key, values in parse_qs(self.query).items()}
        is_storage_host = host == urlsplit(self.hub.storage_url).hostname
        if (
            not is_storage_host
            or self.headers["Authorization"]
            or options.get("signature") != api.signature(oid)
        ):
            raise Refused(
                400,
                "",
                "Only one auth mechanism allowed: the URL's signature, on the storage host",
            )
        repository = self.hub.repository(f"{organization}/{name}", kind)  # type: ignore[arg-type]
        assert repository
        if self.command in {"GET", "HEAD"}:
            self.file = options["name"]
            self.send_file(repository.object_path(oid), {"ETag": f'"{oid}"'})
        elif self.command == "PUT":
            self.receive_object(repository, oid, options)
        else:
            self.complete_object(
                repository, oid, self.read_json(), int(options["size"])
            )

    def receive_object(
        self, repository: Repository, oid: str, options: dict[str, str]
    ) -> None:
        part = options.get("part")
        partial = repository.folder / "parts" / f"{oid}.{part or 'whole'}"
        incomplete = partial.with_name(f"{partial.name}.{threading.get_ident()}")
        with incomplete.open("wb") as file:
            self.receive(file)
        incomplete.replace(partial)
        content = partial.read_bytes()
        if part is None:
            if hashlib.sha256(content).hexdigest() != oid:
                raise Refused(400, "", "BadDigest")
            partial.replace(repository.object_path(oid))
        self.send_empty(200, {"ETag": f'"{hashlib.md5(content).hexdigest()}"'})

    def complete_object(
        self, repository: Repository, oid: str, body: dict[str, Any], size: int
    ) -> None:
        """Join the parts that the client names; refuse a wrong ETag, a missing part and a wrong digest."""
        folder = repository.folder / "parts"
        content = b""
        for part in body["parts"]:
            path = folder / f"{oid}.{part['partNumber']}"
            data = path.read_bytes() if path.is_file() else b""
            if part["etag"].strip('"') != hashlib.md5(data).hexdigest():
                raise Refused(400, "", f"InvalidPart {part['partNumber']}")
            content += data
        if (
            body["oid"] != oid
            or len(content) != size
            or hashlib.sha256(content).hexdigest() != oid
        ):
            raise Refused(400, "", "BadDigest")
        joined = folder / f"{oid}.joined.{threading.get_ident()}"
        joined.write_bytes(content)
        joined.replace(repository.object_path(oid))
        self.send_json({"success": True})


class HubServer(ThreadingHTTPServer):
    """A server whose clients may be killed at any moment."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def start_server(
    hub: Hub, port: int = 0, address: str = LOOPBACK
) -> ThreadingHTTPServer:
    """Return a server of the hub that is bound to an address and a port, and set the hub's URLs."""
    members = {"hub": hub, "lock": threading.Lock()}
    server = HubServer((address, port), type("Handler", (HubHandler,), members))
    hub.url = f"http://{address}:{server.server_port}"
    hub.storage_url = hub.url.replace(LOOPBACK, "localhost")
    return server


@contextmanager
def serve_hub(hub: Hub, address: str = LOOPBACK) -> Iterator[Hub]:
    """Serve the hub in a thread while the context is open; `hub.url` is its address."""
    server = start_server(hub, address=address)
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    ).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    server = start_server(Hub(options.folder), options.port)
    print(f"http://{LOOPBACK}:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
