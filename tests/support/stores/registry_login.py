"""What a proxy asks of clients before they reach the registry: a password, or a bearer token with a scope.

The registry of the test cluster is built without access controllers.
"""

import base64
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from support.stores.registry_proxy import Fault, RegistryProxy

USER = "trainer"
PASSWORD = "secret"
SERVICE = "registry.test"
TOKEN_PATH = "/token"


def basic(password: str = PASSWORD) -> str:
    """Return the header Authorization of the user."""
    return "Basic " + base64.b64encode(f"{USER}:{password}".encode()).decode()


def login(folder: Path, host: str, password: str = PASSWORD) -> Path:
    """Write a config.json with credentials for a host; return its folder, for DOCKER_CONFIG."""
    folder.mkdir(exist_ok=True)
    entry = {"auth": basic(password).removeprefix("Basic ")}
    (folder / "config.json").write_text(json.dumps({"auths": {host: entry}}))
    return folder


def refusal(challenge: str) -> Fault:
    """Return the answer to a client that must authenticate."""
    body = json.dumps(
        {"errors": [{"code": "UNAUTHORIZED", "message": "authentication required"}]}
    ).encode()
    return Fault(401, {"WWW-Authenticate": challenge}, body)


def require_password(proxy: RegistryProxy) -> None:
    """Make the proxy refuse requests without the user's password."""
    proxy.gate = lambda _method, _path, header: (
        None if header == basic() else refusal('Basic realm="test"')
    )


@dataclass
class Tokens:
    """Issues tokens of one scope each, and checks them."""

    proxy: RegistryProxy
    scopes: list[str] = field(default_factory=list)
    """The scopes of all tokens, in order; a token is the number of its scope."""
    expired: set[str] = field(default_factory=set)

    def __call__(self, method: str, path: str, header: str | None) -> Fault | None:
        if path.startswith(TOKEN_PATH):
            return self.issue(parse_qs(urlsplit(path).query), header)
        match = re.search("/v2/(.+)/(?:blobs|manifests|tags)/", path)
        assert match
        repository = match[1]
        action = "pull" if method in {"GET", "HEAD"} else "push"
        token = (header or "").removeprefix("Bearer ")
        scope = "::"
        if token.isdigit() and token not in self.expired:
            scope = self.scopes[int(token)]
        _, _, permitted = scope.rpartition(":")
        if scope.startswith(f"repository:{repository}:") and action in permitted.split(
            ","
        ):
            return None
        actions = "pull" if action == "pull" else "pull,push"
        realm = f"http://{self.proxy.host}{TOKEN_PATH}"
        return refusal(
            f'Bearer realm="{realm}",service="{SERVICE}",scope="repository:{repository}:{actions}"'
        )

    def issue(self, query: dict[str, list[str]], header: str | None) -> Fault:
        if header != basic() or query["service"] != [SERVICE]:
            return Fault(401)
        self.scopes += query["scope"]
        return Fault(
            200, body=json.dumps({"token": str(len(self.scopes) - 1)}).encode()
        )


def require_tokens(proxy: RegistryProxy) -> Tokens:
    """Make the proxy refuse requests without a token that permits them; it issues tokens for the user's password."""
    tokens = Tokens(proxy)
    proxy.gate = tokens
    return tokens
