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

DOCKER_CONFIG = "DOCKER_CONFIG"
"""Environment variable: the folder of config.json, by default ~/.docker."""
# In a pod, this is the key .dockerconfigjson of a Secret, by valueFrom.
AUTH_CONFIG = "DOCKER_AUTH_CONFIG"
"""Environment variable: the content of config.json, which wins over the file."""
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

# Without addresses in which two parsers find different hosts: a password could go to the other host.
TLS_SERVER = re.compile(r"https://[^\s\\@]+")
WEB_SERVER = re.compile(r"https?://[^\s\\@]+")

_PARAMETER = re.compile(r'(\w+)="([^"]*)"')

Get = Callable[[str, dict[str, str], str | None], requests.Response]
"""Returns the response to GET of a URL with a query and a header Authorization."""


def is_plain(host: str) -> bool:
    """Return whether a registry is asked by HTTP without TLS: on this machine, or if the environment names it."""
    if urlsplit(f"//{host}").hostname in LOOPBACK:
        return True
    names = os.environ.get(INSECURE_REGISTRIES, "").split(",")
    return host in {name.strip() for name in names}


class Authorization:
    """The header Authorization for one repository."""

    def __init__(self, host: str, repository: str) -> None:
        self.header: str | None = None
        """The header's value; None until the registry has asked for credentials."""
        self._lock = threading.Lock()
        self._place = f"{host}/{repository}"
        self._host = host
        self._is_plain = is_plain(host)

    def answer(self, challenge: str, refused: str | None, get: Get) -> None:
        """Set the header that a WWW-Authenticate header asks for, unless another thread has replaced `refused`.

        Raise CredentialsRejected if there are no credentials, or the server of tokens refuses them.
        """
        # Layers are sent in several threads. Without the lock, each of them would ask for a token of its own.
        with self._lock:
            if self.header == refused:
                self.header = self._header(challenge, get)

    def _header(self, challenge: str, get: Get) -> str:
        known = read_credentials(self._place)
        scheme, _, parameters = challenge.partition(" ")
        if scheme.lower() == "bearer":
            fields = dict(_PARAMETER.findall(parameters))
            return f"Bearer {self._token(fields, known, get)}"
        if known is None:
            raise CredentialsRejected(
                f"oci://{self._place} requires credentials; {_config()} has none for it"
            )
        return f"Basic {known}"

    def _token(self, parameters: dict[str, str], known: str | None, get: Get) -> str:
        realm = parameters.pop("realm", "")
        allowed = WEB_SERVER if self._is_plain else TLS_SERVER
        if not allowed.fullmatch(realm):
            raise CredentialsRejected(
                f"oci://{self._place} wants credentials for {realm!r}, which is not https"
            )
        # The registry chooses the realm. It must not send the user's password to any server.
        address = urlsplit(realm)
        is_of_registry = _is_of_registry(address.hostname or "", self._host)
        if known is not None and not is_of_registry:
            known = self._credentials_for(address.netloc)
        query: dict[str, str] = {}
        for name in ("service", "scope"):
            if name in parameters:
                query[name] = parameters[name]
        # Without credentials, too: public repositories want an anonymous token.
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
    # An address of IP has no domain.
    if name.replace(".", "").isdigit() or ":" in name:
        return False
    _, _, parent = name.partition(".")
    for domain in (name, parent):
        is_within = server == domain or server.endswith(f".{domain}")
        if "." in domain and is_within:
            return True
    return False


def read_credentials(place: str) -> str | None:
    """Return user:password in base64 for HOST/REPOSITORY, or None. The longest name in config.json that fits wins.

    Raise CredentialsRejected if config.json cannot be read.
    """
    path = _config()
    try:
        text = os.environ.get(AUTH_CONFIG)
        config = json.loads(text or path.read_bytes())
        entries = config.get("auths") or {}
        fitting = [name for name in entries if _fits(name, place)]
        if not fitting:
            return None
        name = max(fitting, key=lambda name: len(_plain_name(name)))
        return _encoded(entries[name], f"{path}: the entry {name}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CredentialsRejected(
            f"{path} is not a .dockerconfigjson that can be read: {error}; correct it"
        ) from None


def _fits(name: str, place: str) -> bool:
    """Return whether an entry's name is HOST/REPOSITORY, or begins it."""
    # The slashes keep the entry registry.example from fitting registry.example.org.
    return f"{place}/".startswith(f"{_plain_name(name)}/")


def _config() -> Path:
    folder = os.environ.get(DOCKER_CONFIG)
    if folder:
        return Path(folder) / "config.json"
    # A user without an entry in /etc/passwd may have no home, for which Path.home() raises an error.
    return Path(os.path.expanduser("~/.docker/config.json"))  # noqa: PTH111


def _plain_name(name: str) -> str:
    """Return HOST or HOST/PATH of an entry's name, which may be a URL of the first protocol: https://HOST/v1/."""
    without_scheme = re.sub(r"^https?://", "", name).rstrip("/")
    plain = re.sub(r"/v[12]$", "", without_scheme)
    # `docker login` writes this name for Docker Hub.
    return re.sub(r"^index\.docker\.io", "docker.io", plain)


def _encoded(entry: dict[str, str], place: str) -> str | None:
    """Return user:password of an entry in base64; raise CredentialsRejected if its auth is not base64."""
    if entry.get("auth"):
        # Programs that encode base64 often wrap it.
        auth = "".join(entry["auth"].split())
        try:
            base64.b64decode(auth, validate=True)
        except ValueError:
            # Without the value and without its cause: messages are logged.
            raise CredentialsRejected(
                f"{place} has an auth that is not base64; write USER:PASSWORD in it"
            ) from None
        return auth
    if entry.get("username"):
        pair = f"{entry['username']}:{entry.get('password', '')}"
        return base64.b64encode(pair.encode()).decode()
    return None
