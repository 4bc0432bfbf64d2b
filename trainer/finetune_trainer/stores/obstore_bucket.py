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
    ServiceUnavailable,
    SourceNotFound,
    StageError,
)
from finetune_trainer.stores import buckets
from finetune_trainer.stores.buckets import (
    PARALLEL_PARTS,
    PART_BYTES,
    SHA256,
    Location,
    RemoteObject,
)

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta
    from obstore.store import ClientConfig, RetryConfig

CHUNK_BYTES = 4 * 1024**2
LIST_CHUNK = 1000
MESSAGE_LENGTH = 300
READ_TIMEOUT_SECONDS = 120.0
"""Time without a byte of a response; a part of an upload must be sent within it."""
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
"""Errors for which obstore has no class. The addresses are those that it asks when it has no other credentials."""
SENT = {
    "s3": (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
    ),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),
}
"""Variables whose values are parts of headers."""
WRONG_REGION = "redirect without LOCATION"
STATUS = re.compile(r"status: (\d{3})")
UNCONDITIONAL = ("W/", "modified ")
"""Beginnings of versions that no condition of a request can name: weak ETags, and times."""
DENIED = frozenset({401, 403})
NO_HEAD = frozenset({HTTPStatus.FORBIDDEN, HTTPStatus.METHOD_NOT_ALLOWED})
"""What a web server answers to HEAD for an address that is signed for GET only."""
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
        attributes = {str(name).lower(): value for name, value in result.attributes.items()}
        return RemoteObject(key, result.meta["size"], _version(result.meta), attributes.get(SHA256))

    def _head(self, key: str) -> "GetResult":
        try:
            # Not obstore.head, which returns no metadata.
            return obstore.get(self._store, self._path(key), options={"head": True})
        except (PermissionDeniedError, FileNotFoundError) as error:
            if not isinstance(self._store, HTTPStore) or _status(error) not in NO_HEAD:
                raise
        try:
            return obstore.get(self._store, "", options={"range": (0, 1)})
        except (
            NotSupportedError,
            GenericError,
        ) as error:  # it knows no ranges, or the file is empty
            if _status(error) not in {None, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE}:
                raise
            return obstore.get(self._store, "")

    def list_below(self, folder: str) -> list[RemoteObject]:
        """Return all objects whose key starts with `folder` and a slash; all objects if it is empty."""
        with self._errors():
            chunks = obstore.list(self._store, folder or None, chunk_size=LIST_CHUNK)
            return [
                RemoteObject(meta["path"], meta["size"], _version(meta))
                for chunk in chunks
                for meta in chunk
            ]

    def read(self, found: RemoteObject, offset: int = 0) -> Iterator[bytes]:
        """Yield the content of an object from an offset on. Raise DataInvalid if it is no longer this version."""
        with self._errors():
            result, skipped = self._get(found, offset)
            if _version(result.meta) != found.version:  # a web server may ignore If-Match
                raise DataInvalid(self._changed(found))
            for chunk in result.stream(CHUNK_BYTES):
                if len(chunk) > skipped:
                    yield bytes(chunk)[skipped:]
                skipped = max(0, skipped - len(chunk))

    def _get(self, found: RemoteObject, offset: int) -> tuple["GetResult", int]:
        """Return the response, and how many bytes of it come before the offset."""
        options: GetOptions = {"range": {"offset": offset}} if offset else {}
        if not found.version.startswith(UNCONDITIONAL):
            options["if_match"] = f'"{found.version}"'
        path = self._path(found.key)
        try:
            return obstore.get(self._store, path, options=options), 0
        except PreconditionError as error:
            raise DataInvalid(self._changed(found)) from error
        except NotSupportedError:  # the server knows no ranges
            return self._get(found, 0)[0], offset

    def upload(self, path: Path, key: str, sha256: str) -> None:
        """Write an object from a file, with its metadata. It appears when it is whole, and replaces another one."""
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
        with self._errors():
            try:
                obstore.put(
                    self._store,
                    path,
                    data,
                    mode="create" if version is None else {"e_tag": f'"{version}"'},
                )
            except (AlreadyExistsError, PreconditionError):
                return False
            except GenericError as error:
                if _status(error) != HTTPStatus.NOT_IMPLEMENTED:
                    raise
                obstore.put(self._store, path, data)
        return True

    def _path(self, key: str) -> str:
        """Return the key in the store; a web server's URL is the store itself, because its query is part of it."""
        return "" if isinstance(self._store, HTTPStore) else key

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of obstore into stage errors."""
        uri = self.location.shown
        try:
            yield
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise self._rejected(error) from error
        except FileNotFoundError as error:
            if WRONG_KEY.search(str(error)):
                raise self._rejected(error) from error
            raise SourceNotFound(f"{uri}: {_text(error)}") from error
        except GenericError as error:
            raise self._classified(error) from error
        except (BaseError, ValueError) as error:
            raise ConfigInvalid(f"{uri}: {_text(error)}") from error

    def _rejected(self, error: Exception) -> CredentialsRejected:
        keys = KEYS.get(self.location.scheme)
        fix = f"check {keys}" if keys else "the file must be readable without credentials"
        return CredentialsRejected(f"{self.location.shown}: access denied; {fix}: {_text(error)}")

    def _classified(self, error: GenericError) -> StageError:
        """Return the stage error for an error without a class of its own."""
        text, status = f"{self.location.shown}: {_text(error)}", _status(error)
        if WRONG_REGION in str(error):
            return ConfigInvalid(f"{text}; set AWS_REGION to the region of the bucket")
        if status in DENIED or WRONG_KEY.search(str(error)):
            return self._rejected(error)
        if status == HTTPStatus.NOT_FOUND:
            return SourceNotFound(f"{text}; create the bucket, or correct the URI")
        if status in PERMANENT:
            return ConfigInvalid(text)
        return ServiceUnavailable(text)

    def _changed(self, found: RemoteObject) -> str:
        return (
            f"{self.location.shown}: {found.key} is no longer the version {found.version} that was listed; "
            "run the pipeline again with the new data, or restore the old version"
        )


def _open(location: Location, environment: Mapping[str, str]) -> S3Store | AzureStore | HTTPStore:
    """Return the store of a URI. A server named by http:// is asked without TLS.

    Raise CredentialsRejected if a value of the environment fits into no header: the library ends the process for it.
    """
    for name in SENT.get(location.scheme, ()):
        value = environment.get(name, "")
        if value != value.strip() or not (value.isascii() and value.isprintable()):
            raise CredentialsRejected(
                f"{name} has a line break, a space or another sign that no key has; remove it"
            )
    names = ENDPOINTS.get(location.scheme, ())
    endpoint = next((environment[name] for name in names if environment.get(name)), location.uri)
    client: ClientConfig = {
        "allow_http": endpoint.startswith("http://")
        or environment.get("AZURE_STORAGE_USE_EMULATOR") == "true",
        "timeout": timedelta(days=1),  # of a whole response, which may have any size
        "connect_timeout": timedelta(seconds=10),
        "read_timeout": timedelta(seconds=READ_TIMEOUT_SECONDS),
    }
    retry: RetryConfig = {
        "max_retries": 1000,  # the time decides
        "retry_timeout": timedelta(seconds=buckets.RETRY_SECONDS),
        "backoff": {"max_backoff": timedelta(seconds=5)},
    }
    match location.scheme:
        case "s3":
            return S3Store(location.bucket, client_options=client, retry_config=retry)
        case "az":
            return AzureStore(location.bucket, client_options=client, retry_config=retry)
        case _:
            return HTTPStore(location.uri, client_options=client, retry_config=retry)


def _version(meta: "ObjectMeta") -> str:
    """Return the ETag without its quotes, which Azure's listings do not have; the time of the change without one."""
    etag = meta["e_tag"]
    return (
        etag.strip('"')
        if etag and not etag.startswith("W/")
        else etag or f"modified {meta['last_modified']}"
    )


def _status(error: Exception) -> int | None:
    """Return the status of the response that an error speaks of, if it speaks of one."""
    found = STATUS.search(str(error))
    return int(found[1]) if found else None


def _text(error: Exception) -> str:
    """Return the first part of an error."""
    text = " ".join(str(error).partition("\n\nDebug source")[0].split())
    return without_secrets(text)[:MESSAGE_LENGTH]
