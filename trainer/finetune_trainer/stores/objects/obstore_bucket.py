"""Buckets of S3 and Azure, and files of web servers, with obstore."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, HTTPStore, S3Store

from finetune_trainer.contract.uris import without_secrets
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    CredentialsRejected,
    DataInvalid,
    MachineUnable,
    ServiceUnavailable,
    SourceNotFound,
    StageError,
)
from finetune_trainer.stores.objects import bucket
from finetune_trainer.stores.objects.bucket import (
    PARALLEL_PARTS,
    PART_BYTES,
    SHA256,
    Location,
    RemoteObject,
)

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta, PutMode
    from obstore.store import ClientConfig, RetryConfig

CHUNK_BYTES = 4 * 1024**2
# S3 returns at most 1,000 keys a page.
LIST_CHUNK = 1000
MESSAGE_LENGTH = 300

# The clock of this limit also runs while a part of an upload is sent, before any byte of the response can come.
READ_TIMEOUT_SECONDS = 120.0
"""Longest time without a byte of a response."""
ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
KEYS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a service account with a role",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or a service account with an identity",
}
WRONG_KEY = re.compile(
    r"InvalidAccessKeyId|XAdminUserNotFound|SignatureDoesNotMatch|ExpiredToken|InvalidToken|Missing(AccessKey|SecretAccess)"
    r"|AuthenticationFailed|Invalid Access Key|169\.254\.\d+\.\d+|metadata\.google"
)
"""Messages of rejected credentials for which obstore has no class.

The addresses are metadata servers of clouds: obstore asks them if the environment has no keys.
"""
HEADER_VARIABLES = {
    "s3": (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
    ),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),
}
"""Environment variables that are sent in headers, by scheme."""
# S3 redirects to the region of the bucket, and obstore cannot follow a redirect that names no address.
NO_CONNECTION = re.compile("dns error|tcp connect error|error trying to connect")
"""Errors of a connection that could not be made at all."""
WRONG_REGION = "redirect without LOCATION"
# obstore's errors have the status in their message only.
STATUS = re.compile(r"status: (\d{3})")
# If-Match needs a strong ETag (RFC 9110): no condition of a request can name these versions.
UNCONDITIONAL = ("W/", "modified ")
"""Beginnings of versions that are weak ETags or times."""
DENIED = frozenset({401, 403})
# A signed address is signed for one method. Web servers answer so to HEAD if it is signed for GET.
NO_HEAD = frozenset({HTTPStatus.FORBIDDEN, HTTPStatus.METHOD_NOT_ALLOWED})
# The excepted statuses are timeouts, conflicts with another request, and throttling: they pass.
PERMANENT = frozenset(range(400, 500)) - {408, 409, 429}
"""Statuses that another attempt would get, too."""


class ObstoreBucket:
    """A bucket of S3, a container of Azure, or one file of a web server."""

    def __init__(self, location: Location, environment: Mapping[str, str]) -> None:
        self.location = location
        with self._errors():
            self._store = _open(location, environment)

    def find(self, key: str) -> RemoteObject | None:
        """Return an object with its metadata, or None if there is none with this key."""
        try:
            with self._errors():
                result = self._head(key)
        except SourceNotFound:
            return None
        size = result.meta["size"]
        version = _version(result.meta)
        # Names of metadata are names of headers, which have no fixed case.
        attributes = {
            str(name).lower(): value for name, value in result.attributes.items()
        }
        return RemoteObject(key, size, version, attributes.get(SHA256))

    def _head(self, key: str) -> "GetResult":
        try:
            # Not obstore.head, which returns no metadata.
            return obstore.get(self._store, self._path(key), options={"head": True})
        except (PermissionDeniedError, FileNotFoundError) as error:
            status = _status(error)
            if not isinstance(self._store, HTTPStore) or status not in NO_HEAD:
                raise
        # The address may be signed for GET only. One byte is enough to learn size and version.
        try:
            return obstore.get(self._store, "", options={"range": (0, 1)})
        except (NotSupportedError, GenericError) as error:
            # The server knows no ranges, or the file is empty and has no first byte.
            if _status(error) not in {None, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE}:
                raise
            return obstore.get(self._store, "")

    def list_below(self, folder: str) -> list[RemoteObject]:
        """Return all objects whose key starts with `folder` and a slash; all objects if it is empty."""
        with self._errors():
            objects = []
            for chunk in obstore.list(
                self._store, folder or None, chunk_size=LIST_CHUNK
            ):
                for meta in chunk:
                    remote = RemoteObject(meta["path"], meta["size"], _version(meta))
                    objects.append(remote)
            return objects

    def read(self, remote: RemoteObject, offset: int = 0) -> Iterator[bytes]:
        """Yield the content of an object from an offset on. Raise DataInvalid if it is no longer this version."""
        with self._errors():
            result, skipped = self._get(remote, offset)
            # A web server may ignore If-Match.
            if _version(result.meta) != remote.version:
                raise DataInvalid(self._changed(remote))
            for chunk in result.stream(CHUNK_BYTES):
                data = bytes(chunk)
                if len(data) > skipped:
                    yield data[skipped:]
                skipped = max(0, skipped - len(data))

    def _get(self, remote: RemoteObject, offset: int) -> tuple["GetResult", int]:
        """Return the response, and how many bytes of it come before the offset."""
        options: GetOptions = {}
        if offset:
            options["range"] = {"offset": offset}
        if not remote.version.startswith(UNCONDITIONAL):
            options["if_match"] = f'"{remote.version}"'
        path = self._path(remote.key)
        try:
            return obstore.get(self._store, path, options=options), 0
        except PreconditionError as error:
            raise DataInvalid(self._changed(remote)) from error
        except NotSupportedError:
            # The server knows no ranges and sends the whole file.
            result, _ = self._get(remote, 0)
            return result, offset

    def upload(self, path: Path, key: str, sha256: str) -> None:
        """Write an object from a file, with its metadata. It appears when it is whole, and replaces an older object."""
        with self._errors():
            obstore.put(
                self._store,
                self._path(key),
                path,
                attributes={SHA256: sha256},
                chunk_size=PART_BYTES,
                max_concurrency=PARALLEL_PARTS,
            )

    def replace(self, key: str, data: bytes, version: str | None) -> bool:
        """Write a small object if it still has this version; with None, if there is none. Return whether it did."""
        path = self._path(key)
        mode: PutMode = "create"
        if version is not None:
            mode = {"e_tag": f'"{version}"'}
        with self._errors():
            try:
                obstore.put(self._store, path, data, mode=mode)
            except (AlreadyExistsError, PreconditionError):
                return False
            except GenericError as error:
                # Some servers that speak S3 know no conditions. A target is safe without them, too: see ObjectTarget.
                if _status(error) != HTTPStatus.NOT_IMPLEMENTED:
                    raise
                obstore.put(self._store, path, data)
        return True

    def _path(self, key: str) -> str:
        """Return the key in the store."""
        # A web server's whole URL opens the store, because a signed address has its signature in the query.
        if isinstance(self._store, HTTPStore):
            return ""
        return key

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of obstore into stage errors."""
        uri = self.location.shown
        try:
            yield
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise self._rejected(error) from error
        except FileNotFoundError as error:
            # obstore takes every status 404 for a missing object, also an answer about the credentials.
            if WRONG_KEY.search(str(error)):
                raise self._rejected(error) from error
            raise SourceNotFound(f"{uri}: {_text(error)}") from error
        except GenericError as error:
            raise self._classified(error) from error
        except (BaseError, ValueError) as error:
            raise ConfigInvalid(f"{uri}: {_text(error)}") from error

    def _rejected(self, error: Exception) -> CredentialsRejected:
        fix = "the file must be readable without credentials"
        if self.location.scheme in KEYS:
            fix = f"check {KEYS[self.location.scheme]}"
        text = _text(error)
        return CredentialsRejected(
            f"{self.location.shown}: access denied; {fix}: {text}"
        )

    def _classified(self, error: GenericError) -> StageError:
        """Return the stage error for an error without a class of its own."""
        text = f"{self.location.shown}: {_text(error)}"
        status = _status(error)
        if WRONG_REGION in str(error):
            return ConfigInvalid(f"{text}; set AWS_REGION to the region of the bucket")
        if status in DENIED or WRONG_KEY.search(str(error)):
            return self._rejected(error)
        if status == HTTPStatus.NOT_FOUND:
            return SourceNotFound(f"{text}; create the bucket, or correct the URI")
        if status in PERMANENT:
            return ConfigInvalid(text)
        if NO_CONNECTION.search(str(error)):
            return MachineUnable(f"{text}; check the network and the endpoint")
        return ServiceUnavailable(text)

    def _changed(self, remote: RemoteObject) -> str:
        return (
            f"{self.location.shown}: {remote.key} is no longer the version {remote.version} that was listed; "
            "run the pipeline again with the new data, or restore the old version"
        )


def _open(
    location: Location, environment: Mapping[str, str]
) -> S3Store | AzureStore | HTTPStore:
    """Return the store of a URI. A server named by http:// is asked without TLS.

    Raise CredentialsRejected if a value of the environment fits into no header.
    """
    # Checked here, because the library ends the process for such a value.
    for name in HEADER_VARIABLES.get(location.scheme, ()):
        value = environment.get(name, "")
        fits_header = value.isascii() and value.isprintable()
        if value != value.strip() or not fits_header:
            raise CredentialsRejected(
                f"{name} has a line break, a space or another sign that no key has; remove it"
            )
    is_plain = _endpoint(location, environment).startswith("http://")
    is_emulator = environment.get("AZURE_STORAGE_USE_EMULATOR") == "true"
    client: ClientConfig = {
        "allow_http": is_plain or is_emulator,
        # The limit of a whole response, which may have any size. The read timeout notices a silent server.
        "timeout": timedelta(days=1),
        "connect_timeout": timedelta(seconds=10),
        "read_timeout": timedelta(seconds=READ_TIMEOUT_SECONDS),
    }
    retry: RetryConfig = {
        # More than fit into the time, so that the time decides.
        "max_retries": 1000,
        "retry_timeout": timedelta(seconds=bucket.RETRY_SECONDS),
        "backoff": {"max_backoff": timedelta(seconds=5)},
    }
    match location.scheme:
        case "s3":
            return S3Store(location.bucket, client_options=client, retry_config=retry)
        case "az":
            return AzureStore(
                location.bucket, client_options=client, retry_config=retry
            )
        case _:
            return HTTPStore(location.uri, client_options=client, retry_config=retry)


def _endpoint(location: Location, environment: Mapping[str, str]) -> str:
    """Return the address of the server that the environment names, or the URI if it names none."""
    for name in ENDPOINTS.get(location.scheme, ()):
        if environment.get(name):
            return environment[name]
    return location.uri


def _version(meta: "ObjectMeta") -> str:
    """Return the ETag of an object, or the time of its last change if the server has no ETags."""
    etag = meta["e_tag"]
    if not etag:
        return f"modified {meta['last_modified']}"
    if etag.startswith("W/"):
        return etag
    # Azure's listings have ETags without quotes, its other responses have them with quotes.
    return etag.strip('"')


def _status(error: Exception) -> int | None:
    """Return the status of the response that an error is about, or None if it is about no response."""
    match = STATUS.search(str(error))
    if match is None:
        return None
    return int(match[1])


def _text(error: Exception) -> str:
    """Return the first part of an error, on one line."""
    # Behind it, obstore prints the Rust structure of the error.
    message, _, _ = str(error).partition("\n\nDebug source")
    text = " ".join(message.split())
    return without_secrets(text)[:MESSAGE_LENGTH]
