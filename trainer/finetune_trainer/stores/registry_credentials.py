"""Credentials of OCI registries: from Docker's config.json to the header of a request.

A registry answers the first request with a challenge: basic, or the address of a server that issues bearer tokens.
"""

import base64
import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import requests

from finetune_trainer.contract.environment import INSECURE_REGISTRIES
from finetune_trainer.runtime.errors import CredentialsRejected

DOCKER_CONFIG, AUTH_CONFIG = "DOCKER_CONFIG", "DOCKER_AUTH_CONFIG"
"""Environment variables: the folder of config.json, by default ~/.docker; or its content, which wins. In a pod, the
content is the key .dockerconfigjson of a Secret, by valueFrom."""
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

# Not those in which two parsers find different hosts.
TLS_SERVER, WEB_SERVER = re.compile(r"https://[^\s\\@]+"), re.compile(r"https?://[^\s\\@]+")

_PARAMETER = re.compile(r'(\w+)="([^"]*)"')

Get = Callable[[str, dict[str, str], str | None], requests.Response]
"""Returns the response to GET of a URL with a query and a header Authorization."""


def is_plain(host: str) -> bool:
    """Return whether a registry is asked by HTTP without TLS: on this machine, and where the environment names it."""
    named = (name.strip() for name in os.environ.get(INSECURE_REGISTRIES, "").split(","))
    return urlsplit(f"//{host}").hostname in LOOPBACK or host in named


class Authorization:
    """The header Authorization for one repository."""

    def __init__(self, host: str, repository: str) -> None:
        self.header: str | None = None
        """The header's value; None until the registry has asked for one."""
        self._lock = threading.Lock()
        self._place, self._host = f"{host}/{repository}", host
        self._is_plain = is_plain(host)

    def answer(self, challenge: str, refused: str | None, get: Get) -> None:
        """Set the header that a WWW-Authenticate header asks for, unless another thread has replaced the refused one.

        Raise CredentialsRejected if there are no credentials, or the server of tokens refuses them.
        """
        with self._lock:
            if self.header == refused:
                self.header = self._header(challenge, get)

    def _header(self, challenge: str, get: Get) -> str:
        known = read_credentials(self._place)
        scheme, _, parameters = challenge.partition(" ")
        if scheme.lower() == "bearer":
            return f"Bearer {self._token(dict(_PARAMETER.findall(parameters)), known, get)}"
        if known is None:
            raise CredentialsRejected(
                f"oci://{self._place} requires credentials; {_config()} has none for it"
            )
        return f"Basic {known}"

    def _token(self, parameters: dict[str, str], known: str | None, get: Get) -> str:
        realm = parameters.pop("realm", "")
        if not (WEB_SERVER if self._is_plain else TLS_SERVER).fullmatch(realm):
            raise CredentialsRejected(
                f"oci://{self._place} wants credentials for {realm!r}, which is not https"
            )
        if known is not None and not _is_of_registry(urlsplit(realm).hostname or "", self._host):
            known = self._credentials_for(urlsplit(realm).netloc)
        query = {name: value for name, value in parameters.items() if name in {"service", "scope"}}
        response = get(realm, query, known and f"Basic {known}")
        try:
            answer = response.json() if response.ok else {}
            return str(answer.get("token") or answer["access_token"])
        except (ValueError, KeyError, AttributeError):
            raise CredentialsRejected(
                f"oci://{self._place}: {realm} refuses a token: status {response.status_code}; "
                f"correct the credentials in {_config()}"
            ) from None

    def _credentials_for(self, server: str) -> str:
        """Return the credentials that config.json has for a server of tokens; raise CredentialsRejected for none."""
        known = read_credentials(server)
        if known is None:
            raise CredentialsRejected(
                f"oci://{self._place} wants its credentials for {server}, which is of another domain; "
                f"if that is right, add an entry for {server} to {_config()}"
            )
        return known


def _is_of_registry(server: str, host: str) -> bool:
    """Return whether a server of tokens is the registry itself, or a host of its domain or its parent domain.

    A parent domain has two labels or more. It may still be a public suffix: registry.co.uk trusts hosts of co.uk.
    """
    name = urlsplit(f"//{host}").hostname or ""
    if server == name:
        return True
    if name.replace(".", "").isdigit() or ":" in name:  # an address of IP has no domain
        return False
    domains = {domain for domain in (name, name.partition(".")[2]) if "." in domain}
    return any(server == domain or server.endswith(f".{domain}") for domain in domains)


def read_credentials(place: str) -> str | None:
    """Return user:password in base64 for HOST/REPOSITORY, or None. The longest name in config.json that fits wins.

    Raise CredentialsRejected if config.json cannot be read.
    """
    path = _config()
    try:
        text = os.environ.get(AUTH_CONFIG)
        entries = json.loads(text or path.read_bytes()).get("auths") or {}
        fitting = [name for name in entries if f"{place}/".startswith(f"{_plain_name(name)}/")]
        name = max(fitting, key=lambda name: len(_plain_name(name)), default=None)
        return None if name is None else _encoded(entries[name], f"{path}: the entry {name}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CredentialsRejected(
            f"{path} is not a .dockerconfigjson that can be read: {error}; correct it"
        ) from None


def _config() -> Path:
    folder = os.environ.get(DOCKER_CONFIG)
    return (Path(folder) if folder else Path.home() / ".docker") / "config.json"


def _plain_name(name: str) -> str:
    """Return HOST or HOST/PATH of an entry's name, which may be a URL of the first protocol: https://HOST/v1/."""
    plain = re.sub(r"/v[12]$", "", re.sub(r"^https?://", "", name).rstrip("/"))
    return re.sub(r"^index\.docker\.io", "docker.io", plain)


def _encoded(entry: dict[str, str], place: str) -> str | None:
    """Return user:password of an entry in base64; raise CredentialsRejected, without the value, if its auth is none."""
    if entry.get("auth"):
        auth = "".join(entry["auth"].split())  # base64 is often wrapped
        try:
            base64.b64decode(auth, validate=True)
        except ValueError:
            raise CredentialsRejected(
                f"{place} has an auth that is not base64; write USER:PASSWORD in it"
            ) from None
        return auth
    if entry.get("username"):
        return base64.b64encode(
            f"{entry['username']}:{entry.get('password', '')}".encode()
        ).decode()
    return None
