"""Buckets of Google Cloud Storage, with google-cloud-storage."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finetune_trainer.contract.uris import without_secrets
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    CredentialsRejected,
    DataInvalid,
    MachineUnable,
    ServiceUnavailable,
    SourceNotFound,
)
from finetune_trainer.stores.objects import bucket
from finetune_trainer.stores.objects.bucket import (
    PART_BYTES,
    SHA256,
    Location,
    RemoteObject,
)

try:
    import requests
    from google.api_core import exceptions as api
    from google.auth import exceptions as auth
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage
    from google.cloud.storage.retry import DEFAULT_RETRY
except ImportError as error:
    raise ConfigInvalid(
        f"gs:// needs the library google-cloud-storage: pip install 'finetune-operator[gcs]' ({error})"
    ) from error

# The content of a key's file. Google's own GOOGLE_APPLICATION_CREDENTIALS names a file, and envFrom mounts no files.
KEY = "GOOGLE_SERVICE_ACCOUNT_KEY"
EMULATOR = "STORAGE_EMULATOR_HOST"


class GoogleBucket:
    """A bucket of Google Cloud Storage."""

    def __init__(self, location: Location, environment: Mapping[str, str]) -> None:
        self.location = location
        with self._errors():
            self._bucket: Any = _client(environment).bucket(location.bucket)
        self._options = {
            "timeout": bucket.RETRY_SECONDS,
            "retry": DEFAULT_RETRY.with_timeout(bucket.RETRY_SECONDS),
        }

    def find(self, key: str) -> RemoteObject | None:
        """Return an object with its metadata, or None if there is none with this key."""
        with self._errors():
            blob = self._bucket.get_blob(key, **self._options)
        if blob is None:
            return None
        return _describe(blob)

    def list_below(self, folder: str) -> list[RemoteObject]:
        """Return all objects whose key starts with `folder` and a slash; all objects if it is empty."""
        prefix = folder and f"{folder}/"
        with self._errors():
            blobs = self._bucket.list_blobs(prefix=prefix, **self._options)
            return [_describe(blob) for blob in blobs]

    def read(self, remote: RemoteObject, offset: int = 0) -> Iterator[bytes]:
        """Yield the content of an object from an offset on. Raise DataInvalid if it is no longer this version."""
        # A request for each part, because the library holds the answer to a request in memory.
        for start in range(offset, remote.size, PART_BYTES):
            with self._errors():
                data = self._read_part(remote, start)
            yield data

    def _read_part(self, remote: RemoteObject, start: int) -> bytes:
        generation = int(remote.version)
        blob = self._bucket.blob(remote.key, generation=generation)
        try:
            content: bytes = blob.download_as_bytes(
                start=start,
                end=min(start + PART_BYTES, remote.size) - 1,
                if_generation_match=generation,
                raw_download=True,
                # The server has a checksum of the object, and none of a range.
                checksum=None,
                **self._options,
            )
        except (api.PreconditionFailed, api.NotFound) as error:
            raise DataInvalid(
                f"{self.location.uri}: {remote.key} is no longer the generation {remote.version} that was "
                "listed; run the pipeline again with the new data, or restore the old generation"
            ) from error
        return content

    def upload(self, path: Path, key: str, sha256: str) -> None:
        """Write an object from a file, with its metadata. It appears when it is whole, and replaces an older object."""
        blob = self._bucket.blob(key, chunk_size=PART_BYTES)
        blob.metadata = {SHA256: sha256}
        with self._errors():
            blob.upload_from_filename(str(path), checksum="crc32c", **self._options)

    def replace(self, key: str, data: bytes, version: str | None) -> bool:
        """Write a small object if it still has this version; with None, if there is none. Return whether it did."""
        # The generation 0 stands for an object that does not exist.
        generation = int(version or 0)
        blob = self._bucket.blob(key)
        with self._errors():
            try:
                blob.upload_from_string(
                    data, if_generation_match=generation, **self._options
                )
            except api.PreconditionFailed:
                return False
        return True

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of Google's libraries into stage errors."""
        uri = self.location.uri
        try:
            yield
        except (
            api.Unauthorized,
            api.Forbidden,
            auth.DefaultCredentialsError,
            auth.RefreshError,
        ) as error:
            raise CredentialsRejected(
                f"{uri}: access denied; check {KEY}, or the service account: {without_secrets(error)}"
            ) from error
        except api.NotFound as error:
            raise SourceNotFound(
                f"{uri}: {without_secrets(error)}; create the bucket, or correct the URI"
            ) from error
        except (
            api.ServerError,
            api.TooManyRequests,
            api.RetryError,
            auth.TransportError,
        ) as error:
            raise ServiceUnavailable(f"{uri}: {without_secrets(error)}") from error
        except requests.RequestException as error:
            no_connection = isinstance(error, requests.ConnectionError)
            kind = MachineUnable if no_connection else ServiceUnavailable
            raise kind(
                f"{uri}: the server does not respond: {without_secrets(error)}"
            ) from error
        except api.GoogleAPICallError as error:
            raise ConfigInvalid(f"{uri}: {without_secrets(error)}") from error


def _client(environment: Mapping[str, str]) -> Any:
    """Return a client with the key of the environment, else with the credentials that the machine provides."""
    # An emulator knows neither projects nor credentials, and the library demands both.
    if environment.get(EMULATOR):
        return storage.Client(project="emulator", credentials=AnonymousCredentials())
    if not environment.get(KEY):
        return storage.Client()
    try:
        key = json.loads(environment[KEY])
        return storage.Client.from_service_account_info(key)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CredentialsRejected(
            f"{KEY} is not the JSON of a service account's key: {error}"
        ) from error


def _describe(blob: Any) -> RemoteObject:
    metadata = blob.metadata or {}
    sha256 = metadata.get(SHA256)
    return RemoteObject(blob.name, blob.size, str(blob.generation), sha256)
