"""The API of a Hugging Face hub on JSON: repositories, revisions, trees, commits, and LFS batches."""

import base64
import hashlib
import json
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any
from urllib.parse import parse_qs, urlencode

import yaml
from support.stores.hub_state import (
    Access,
    Entry,
    Hub,
    Kind,
    Refused,
    Repository,
    git_oid,
    is_large,
)
from support.stores.hub_xet import TOKEN_SECONDS, Permission

PAGE = 5
"""Entries on a page of a tree; small, so that tests go through several."""
PART_BYTES = 256 * 1024
"""LFS objects that are larger are uploaded in parts of this size."""
LFS_TYPE = "application/vnd.git-lfs+json"


def authenticate(hub: Hub, header: str | None) -> Access | None:
    """Return what a request's token allows, None without a token; refuse a token that is not known."""
    if header is None:
        return None
    scheme, _, token = header.partition(" ")
    access = hub.access(token) if scheme == "Bearer" else None
    if access is None:
        raise Refused(401, "", "Invalid credentials in Authorization header")
    return access


def visible(hub: Hub, name: str, kind: Any, access: Access | None) -> Repository:
    """Return a repository that the user may see. Without a token, a private one and none at all look the same."""
    repository = hub.repository(name, kind)
    hidden = (
        repository is not None
        and repository.settings["private"]
        and not (access and access.owns(name))
    )
    if repository is None or hidden:
        raise Refused(
            401 if access is None else 404, "RepoNotFound", "Repository not found"
        )
    return repository


def check_readable(repository: Repository, access: Access | None) -> None:
    """Refuse the files of a gated repository to users who have not accepted its licence."""
    if not repository.settings["gated"] or (access and access.owns(repository.name)):
        return
    if access is None:
        raise Refused(
            401,
            "GatedRepo",
            f"Access to {repository.kind[:-1]} {repository.name} is restricted.",
        )
    if repository.name not in access.accepted:
        raise Refused(
            403,
            "GatedRepo",
            f"Access to {repository.name} is restricted. Visit its page to ask for access.",
        )


def check_writable(repository: str, access: Access | None) -> None:
    if access is None:
        raise Refused(401, "", "Invalid username or password.")
    if not access.write or not access.owns(repository):
        raise Refused(403, "", f"you don't have the rights to write to {repository}")


def whoami(access: Access | None) -> dict[str, Any]:
    if access is None:
        raise Refused(401, "", "Invalid username or password.")
    role = "write" if access.write else "read"
    return {
        "type": "user",
        "name": access.user,
        "orgs": [{"name": name} for name in access.organizations],
        "auth": {
            "type": "access_token",
            "accessToken": {"displayName": "test", "role": role},
        },
    }


def create(
    hub: Hub, access: Access | None, body: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    """Create a repository; 409 with its URL if it exists."""
    owner = body.get("organization") or getattr(access, "user", "")
    name = f"{owner}/{body['name']}"
    kind: Kind = "datasets" if body.get("type") == "dataset" else "models"
    check_writable(name, access)
    prefix = "" if kind == "models" else f"{kind}/"
    answer = {"url": f"{hub.url}/{prefix}{name}", "name": name}
    if hub.repository(name, kind):
        return 409, answer | {"error": "You already created this model repo"}
    hub.add_repository(name, kind=kind, private=body.get("visibility") == "private")
    return 200, answer


def yaml_errors(text: str) -> list[dict[str, str]]:
    """Return what is wrong with the YAML at the top of a README.md."""
    if not text.startswith("---\n"):
        return []
    try:
        data = yaml.safe_load(text.split("---\n")[1])
    except yaml.YAMLError as error:
        return [{"message": f"invalid YAML: {error}"}]
    if data is None or isinstance(data, dict):
        return []
    return [{"message": "metadata is not a mapping"}]


def description(repository: Repository, revision: str) -> dict[str, Any]:
    commit = repository.resolve(revision)
    return {
        "_id": "1",
        "id": repository.name,
        "sha": commit,
        "private": repository.settings["private"],
        "gated": "manual" if repository.settings["gated"] else False,
        "tags": [],
        "downloads": 0,
        "likes": 0,
        "siblings": [{"rfilename": name} for name in repository.tree(commit)],
    }


def refs(repository: Repository) -> dict[str, Any]:
    def entries(kind: str) -> list[dict[str, str]]:
        folder = "heads" if kind == "branches" else "tags"
        return [
            {"name": name, "ref": f"refs/{folder}/{name}", "targetCommit": commit}
            for name, commit in repository.refs[kind].items()
        ]

    return {
        "branches": entries("branches"),
        "tags": entries("tags"),
        "converts": [],
    }


def tree_page(
    repository: Repository, revision: str, below: str, query: str
) -> tuple[list[dict[str, Any]], str | None]:
    """Return a page of the entries below a folder, and the query of the next page."""
    options = parse_qs(query)
    recursive = options.get("recursive", ["false"])[0].lower() == "true"
    prefix = f"{below}/" if below else ""
    entries = []
    for entry in all_entries(repository, revision):
        is_below = entry["path"].startswith(prefix)
        name = entry["path"].removeprefix(prefix)
        if is_below and (recursive or "/" not in name):
            entries.append(entry)
    if below and not entries:
        raise Refused(404, "EntryNotFound", f'{below} does not exist on "{revision}"')
    start = int(options.get("cursor", ["0"])[0])
    end = start + PAGE
    more = None
    if end < len(entries):
        more = urlencode({"recursive": recursive, "cursor": end})
    return entries[start:end], more


def all_entries(repository: Repository, revision: str) -> list[dict[str, Any]]:
    """Return the files and folders of a revision as the hub describes them."""
    tree = repository.tree(repository.resolve(revision))
    folders = {
        name[:index]
        for name in tree
        for index, letter in enumerate(name)
        if letter == "/"
    }
    described: list[dict[str, Any]] = [
        {
            "type": "directory",
            "path": name,
            "size": 0,
            "oid": git_oid(name.encode()),
        }
        for name in folders
    ]
    for name, entry in tree.items():
        file = {"type": "file", "path": name, "size": entry.size, "oid": entry.oid}
        if entry.sha256:
            file["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": 130}
            xet_hash = repository.xet_hash(entry.sha256)
            if xet_hash:
                file["xetHash"] = xet_hash
        described.append(file)
    return sorted(described, key=lambda item: item["path"])


def paths_info(
    repository: Repository, revision: str, body: bytes
) -> list[dict[str, Any]]:
    names = set(parse_qs(body.decode())["paths"])
    return [
        entry for entry in all_entries(repository, revision) if entry["path"] in names
    ]


def preupload(
    repository: Repository, revision: str, body: dict[str, Any]
) -> dict[str, Any]:
    """Return for each file how it is uploaded, and which object the revision has under its name."""
    tree = repository.tree(repository.resolve(revision))
    ignored = [line for line in body.get("gitIgnore", "").splitlines() if line]
    files = []
    for file in body["files"]:
        large = is_large(file["path"], file["size"], base64.b64decode(file["sample"]))
        answer = {
            "path": file["path"],
            "uploadMode": "lfs" if large else "regular",
            "shouldIgnore": any(fnmatch(file["path"], pattern) for pattern in ignored),
        }
        if file["path"] in tree:
            answer["oid"] = tree[file["path"]].etag
        files.append(answer)
    return {"files": files}


def batch(repository: Repository, body: dict[str, Any], storage: str) -> dict[str, Any]:
    """Return the address of the upload of each LFS object; no actions for an object that is there."""
    if body["operation"] != "upload" or body.get("hash_algo") != "sha256":
        raise Refused(422, "", "only uploads by sha256")
    multipart = "multipart" in body["transfers"]
    objects = [
        batch_object(repository, item, storage, multipart=multipart)
        for item in body["objects"]
    ]
    return {"transfer": "multipart" if multipart else "basic", "objects": objects}


def batch_object(
    repository: Repository, item: dict[str, Any], storage: str, *, multipart: bool
) -> dict[str, Any]:
    oid = item["oid"]
    size = item["size"]
    answer: dict[str, Any] = {"oid": oid, "size": size, "authenticated": True}
    if repository.has_object(oid, size):
        return answer
    url = f"{storage}/storage/{repository.kind}/{repository.name}/{oid}?signature={signature(oid)}&size={size}"
    upload: dict[str, Any] = {"href": url}
    if multipart and size > PART_BYTES:
        parts = range(1, -(-size // PART_BYTES) + 1)
        upload["header"] = {str(number): f"{url}&part={number}" for number in parts}
        upload["header"]["chunk_size"] = str(PART_BYTES)
        upload["href"] = f"{url}&complete=1"
    verify = f"{repository_url(repository)}.git/info/lfs/objects/verify"
    return answer | {"actions": {"upload": upload, "verify": {"href": verify}}}


def repository_url(repository: Repository) -> str:
    prefix = "" if repository.kind == "models" else f"{repository.kind}/"
    return f"https://huggingface.co/{prefix}{repository.name}"


def signature(oid: str) -> str:
    """Return the proof that a URL of the storage host comes from this hub."""
    return hashlib.sha256(f"storage of {oid}".encode()).hexdigest()[:16]


def commit(
    repository: Repository, branch: str, body: bytes
) -> tuple[dict[str, Any], int]:
    """Make one commit of NDJSON, or refuse all of it. Return the answer and the bytes of files in the body."""
    lines = [json.loads(line) for line in body.splitlines()]
    if branch not in repository.refs["branches"]:
        raise Refused(404, "RevisionNotFound", f"Invalid rev id: {branch}")
    if not lines or lines[0]["key"] != "header" or not lines[0]["value"]["summary"]:
        raise Refused(400, "", "the first line is not a header with a summary")
    head = repository.refs["branches"][branch]
    header = lines[0]["value"]
    if header.get("parentCommit", head) != head:
        raise Refused(
            412, "", "A commit has happened since. Please refresh and try again."
        )
    additions, deleted = changes(repository, repository.tree(head), lines[1:])
    oid = repository.commit(branch, additions, delete=deleted, title=header["summary"])
    received = sum(
        len(base64.b64decode(line["value"]["content"]))
        for line in lines
        if line["key"] == "file"
    )
    return {
        "success": True,
        "commitOid": oid,
        "commitUrl": f"{repository_url(repository)}/commit/{oid}",
    }, received


def changes(
    repository: Repository, tree: dict[str, Entry], lines: list[dict[str, Any]]
) -> tuple[dict[str, Entry], tuple[str, ...]]:
    """Return the added entries and the deleted names; refuse changes that git or the hub would refuse."""
    additions: dict[str, Entry] = {}
    deleted: list[str] = []
    for line in lines:
        name = line["value"]["path"]
        is_path = not {"", ".", "..", ".git"} & set(name.split("/"))
        if name in additions or name in deleted or not is_path:
            raise Refused(400, "", f"{name} twice, or not a path")
        if line["key"] in {"file", "lfsFile"}:
            additions[name] = added(repository, line)
        else:
            deleted += removed(tree, line["key"], name)
    if not additions and not deleted:
        raise Refused(400, "", "an empty commit")
    return additions, tuple(deleted)


def added(repository: Repository, line: dict[str, Any]) -> Entry:
    value = line["value"]
    if line["key"] == "file":
        path = value["path"]
        content = base64.b64decode(value["content"], validate=True)
        if path == "README.md":
            for error in yaml_errors(content.decode()):
                raise Refused(400, "", error["message"])
        if is_large(path, len(content), content[:512]):
            raise Refused(400, "", f"{path} must be uploaded with LFS")
        return repository.store_blob(content)
    oid = value["oid"]
    size = value["size"]
    if value["algo"] != "sha256" or not repository.has_object(oid, size):
        raise Refused(400, "", f"there is no LFS object {oid} of this size")
    return repository.pointer(oid, size)


def xet_token(
    hub: Hub, repository: Repository, access: Access | None, permission: Permission
) -> dict[str, Any]:
    """Return the address of the CAS server and a token for it."""
    if not repository.settings["xet"]:
        raise Refused(404, "", f"{repository.name} has no files in xet")
    if permission == "write":
        check_writable(repository.name, access)
    else:
        check_readable(repository, access)
    token = "read"
    expires = int(time.time()) + TOKEN_SECONDS
    if hub.xet:
        token, expires = hub.xet.issue(permission)
    return {"accessToken": token, "exp": expires, "casUrl": hub.cas_url}


def xet_link(
    hub: Hub, repository: Repository, sha256: str, commit: str
) -> dict[str, str]:
    """Return the headers by which a client finds a file in xet; none if it is not there."""
    xet_hash = repository.xet_hash(sha256)
    if not xet_hash:
        return {}
    route = f"{hub.url}/api/{repository.kind}/{repository.name}/xet-read-token/{commit}"
    return {"X-Xet-Hash": xet_hash, "X-Xet-Refresh-Route": route}


def removed(tree: dict[str, Entry], key: str, name: str) -> Iterator[str]:
    matching = [entry for entry in tree if entry == name]
    if key == "deletedFolder":
        matching += [entry for entry in tree if entry.startswith(f"{name}/")]
    if key not in {"deletedFile", "deletedFolder"} or not matching:
        raise Refused(
            404, "EntryNotFound", f"A file with this name doesn't exist: {name}"
        )
    yield from matching


def tag(repository: Repository, revision: str, body: dict[str, Any]) -> None:
    if body["tag"] in repository.refs["tags"]:
        raise Refused(409, "", f"Tag reference exists already: {body['tag']}")
    repository.set_ref("tags", body["tag"], repository.resolve(revision))


def branch(repository: Repository, name: str, body: dict[str, Any]) -> None:
    if name in repository.refs["branches"]:
        raise Refused(409, "", f"Reference already exists: {name}")
    repository.set_ref(
        "branches", name, repository.resolve(body.get("startingPoint", "main"))
    )
