"""The distribution protocol of OCI registries: blobs and manifests of one repository over HTTP.

Requests that fail because of the network or the registry are repeated for a minute.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from http.cookiejar import DefaultCookiePolicy
from typing import Any, TypeVar
from urllib.parse import urlencode, urljoin, urlsplit

import requests
from requests.exceptions import RequestException, SSLError
from urllib3.exceptions import HTTPError

from finetune_trainer.contract.environment import INSECURE_REGISTRIES
from finetune_trainer.contract.uris import without_secrets
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    CredentialsRejected,
    Interrupted,
    ServiceUnavailable,
    SourceNotFound,
)
from finetune_trainer.stop_signal import stop
from finetune_trainer.stores.oci_image import MANIFEST_TYPE, ImageName
from finetune_trainer.stores.registry_credentials import Authorization, is_plain

RETRY_SECONDS = 60.0
"""Time from the first failure of a request to the last attempt."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, STOP_POLL_SECONDS = 0.25, 16.0, 0.25
TIMEOUT_SECONDS = (10.0, 30.0)
"""To connect, and for each read."""
COMMIT_TIMEOUT_SECONDS = (30.0, 300.0)
"""The same for the end of an upload: the registry may copy the blob before it answers."""
READ_BYTES = 1 << 20
"""The most that one read returns. It returns what has arrived: a connection that ends early loses nothing."""
LARGEST_MANIFEST = 4 << 20
"""Bytes; the limit of the protocol."""

API_HOSTS = {"docker.io": "registry-1.docker.io"}
"""Registries whose name in images is not their host."""

MANIFEST_TYPES = (
    MANIFEST_TYPE,
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
UPLOAD_LOST = re.compile(
    "BLOB_UNKNOWN|BLOB_UPLOAD_UNKNOWN|BLOB_UPLOAD_INVALID|DIGEST_INVALID|SIZE_INVALID"
)
"""Codes after which the same push may succeed: the registry was restarted or cleaned, or bytes were damaged."""
WRONG_TLS = {
    "CERTIFICATE_VERIFY_FAILED": "set SSL_CERT_FILE to the certificates of its authority",
    "WRONG_VERSION_NUMBER": f"if it has no TLS, add the host to {INSECURE_REGISTRIES}",
}

T = TypeVar("T")
Authorize = Callable[[requests.PreparedRequest], requests.PreparedRequest]


class Unavailable(Exception):
    """The registry cannot answer now; the message says why."""

    def __init__(self, reason: object, pause: float | None = None) -> None:
        super().__init__(reason)
        self.pause = pause
        """Seconds that the registry asks to wait; None if it does not say."""


class RegistryClient:
    """The blobs and manifests of one repository.

    All methods raise CredentialsRejected, SourceNotFound, ServiceUnavailable and ConfigInvalid, with the URI.
    """

    def __init__(self, uri: str, image: ImageName) -> None:
        self.uri = uri
        self._origin = f"{'http' if is_plain(image.host) else 'https'}://{API_HOSTS.get(image.host, image.host)}"
        self._base = f"{self._origin}/v2/{image.repository}"
        self._authorization = Authorization(image.host, image.repository)
        self._session = requests.Session()
        self._session.verify = os.environ.get("SSL_CERT_FILE") or True
        self._session.headers["Accept-Encoding"] = (
            "identity"  # sizes and ranges are those of the stored bytes
        )
        # A registry that is also a web site takes a client with its cookies for a browser.
        self._session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))

    def manifest(self, reference: str) -> bytes | None:
        """Return the manifest of a tag or a digest, or None if there is none."""

        def attempt() -> bytes | None:
            url = f"{self._base}/manifests/{reference}"
            with closing(
                self._send("GET", url, headers={"Accept": ", ".join(MANIFEST_TYPES)}, stream=True)
            ) as found:
                if found.status_code == HTTPStatus.NOT_FOUND:
                    return None
                content = b""
                for chunk in _chunks(found):
                    content += chunk
                    if len(content) > LARGEST_MANIFEST:
                        raise ConfigInvalid(
                            f"{self.uri}: its manifest is larger than {LARGEST_MANIFEST:,} bytes"
                        )
            return content

        return self._repeat(attempt)

    def put_manifest(self, reference: str, manifest: bytes) -> None:
        """Store a manifest under a tag or its digest."""
        headers = {"Content-Type": MANIFEST_TYPE}
        self._repeat(lambda: self._put(f"{self._base}/manifests/{reference}", manifest, headers))

    def blob_size(self, digest: str, expected: int) -> int | None:
        """Return the size of a blob in bytes, the expected one if the registry does not say, None if there is none."""

        def attempt() -> int | None:
            found = self._send("HEAD", f"{self._base}/blobs/{digest}")
            if found.status_code == HTTPStatus.NOT_FOUND:
                return None
            return int(found.headers.get("Content-Length", expected))

        return self._repeat(attempt)

    def upload(self, digest: str, content: Iterable[bytes] | bytes) -> None:
        """Store a blob, whose content has a length and can be read again: each attempt sends it from its beginning."""

        def attempt() -> None:
            begun = self._send("POST", f"{self._base}/blobs/uploads/")
            if begun.status_code == HTTPStatus.NOT_FOUND:
                raise SourceNotFound(
                    f"{self.uri}: the registry has no such repository: {_reason(begun)}; create it"
                )
            location = urljoin(begun.url, begun.headers.get("Location", ""))
            url = f"{location}{'&' if urlsplit(location).query else '?'}{urlencode({'digest': digest})}"
            self._put(url, content, {"Content-Type": "application/octet-stream"})

        self._repeat(attempt)

    def _put(self, url: str, content: Iterable[bytes] | bytes, headers: dict[str, str]) -> None:
        answer = self._send(
            "PUT", url, headers=headers, data=content, timeout=COMMIT_TIMEOUT_SECONDS
        )
        if answer.status_code == HTTPStatus.NOT_FOUND:
            raise Unavailable(_reason(answer))

    def read_blob(self, digest: str, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes of a blob from `start` to `end`, or to the blob's end; nothing if there is no such blob.

        Raise Unavailable if the connection fails or ends early.
        """
        headers = {"Range": f"bytes={start}-{end - 1}"}
        with closing(
            self._send("GET", f"{self._base}/blobs/{digest}", headers=headers, stream=True)
        ) as found:
            if found.status_code in {
                HTTPStatus.NOT_FOUND,
                HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
            }:
                return
            position = start if found.status_code == HTTPStatus.PARTIAL_CONTENT else 0
            for chunk in _chunks(found):
                yield chunk[max(0, start - position) : max(0, end - position)]
                position += len(chunk)
                if (
                    position >= end
                ):  # the rest is of another file, or endless; the digest shows if bytes are wrong
                    return

    def _send(self, method: str, url: str, **options: Any) -> requests.Response:
        """Return the response to a request, which succeeded or found nothing. Raise Unavailable if it may later."""
        used = self._authorization.header
        response = self._once(method, url, self._authorize, **options)
        if (
            response.status_code == HTTPStatus.UNAUTHORIZED
            and "WWW-Authenticate" in response.headers
        ):
            response.close()
            self._authorization.answer(response.headers["WWW-Authenticate"], used, self._get_token)
            response = self._once(method, url, self._authorize, **options)
        self._check(response)
        return response

    def _get_token(self, url: str, query: dict[str, str], header: str | None) -> requests.Response:
        response = self._once(
            "GET", url, lambda request: _with_header(request, header), params=query
        )
        _check_available(response)
        return response

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        """Set the header for the registry itself only: an upload may go to another host."""
        is_own = urlsplit(request.url or "")[:2] == urlsplit(self._origin)[:2]
        return _with_header(request, self._authorization.header if is_own else None)

    def _once(
        self, method: str, url: str, authorize: Authorize, **options: Any
    ) -> requests.Response:
        try:
            return self._session.request(
                method, url, auth=authorize, **{"timeout": TIMEOUT_SECONDS, **options}
            )
        except SSLError as error:
            for code, fix in WRONG_TLS.items():
                if code in str(error):
                    raise ConfigInvalid(
                        f"{self.uri}: no TLS connection: {without_secrets(error)}; {fix}"
                    ) from None
            raise Unavailable(error) from error
        except RequestException as error:
            raise Unavailable(error) from error

    def _check(self, response: requests.Response) -> None:
        """Raise the error that a response stands for; that there is nothing of the name is none."""
        _check_available(response)
        if response.status_code in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            raise CredentialsRejected(
                f"{self.uri}: the registry refuses {response.request.method}: {_reason(response)}; "
                "correct the name, or use credentials that may do this"
            )
        nothing_there = {HTTPStatus.NOT_FOUND, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE}
        if (
            response.status_code >= HTTPStatus.BAD_REQUEST
            and response.status_code not in nothing_there
        ):
            if UPLOAD_LOST.search(reason := _reason(response)):
                raise Unavailable(reason)
            raise ConfigInvalid(
                f"{self.uri}: the registry refuses {response.request.method}: {reason}"
            )

    def _repeat(self, attempt: Callable[[], T]) -> T:
        """Return what an attempt returns; repeat it while the registry is unavailable."""
        outage = Outage(self.uri)
        while True:
            try:
                return attempt()
            except Unavailable as problem:
                outage.wait(problem)


class Outage:
    """The time in which a registry has failed without a success in between."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._end: float | None = None
        self._pause = FIRST_PAUSE_SECONDS

    def wait(self, problem: Unavailable) -> None:
        """Wait before the next attempt. Raise ServiceUnavailable after RETRY_SECONDS, Interrupted if asked to stop."""
        now = time.monotonic()
        self._end = self._end or now + RETRY_SECONDS
        pause = self._pause if problem.pause is None else problem.pause
        if now + pause > self._end:
            raise ServiceUnavailable(
                f"{self._uri}: the registry does not serve: {without_secrets(problem)}; retry later"
            ) from problem
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        while (left := now + pause - time.monotonic()) > 0:
            if stop.requested:
                raise Interrupted
            time.sleep(min(left, STOP_POLL_SECONDS))


def _check_available(response: requests.Response) -> None:
    """Raise Unavailable for a response that a later request may not get."""
    status = response.status_code
    busy = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.REQUEST_TIMEOUT}
    if status in busy or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise Unavailable(_reason(response), _retry_after(response))


def _retry_after(response: requests.Response) -> float | None:
    """Return the seconds that the header Retry-After asks for: a number, or a date beside the response's own."""
    value = response.headers.get("Retry-After", "")
    if value.isdigit():
        return float(value)
    try:
        until, now = parsedate_to_datetime(value), parsedate_to_datetime(response.headers["Date"])
        return max(0.0, (until - now).total_seconds())
    except (ValueError, KeyError, TypeError):
        return None


def _with_header(request: requests.PreparedRequest, header: str | None) -> requests.PreparedRequest:
    """Set or remove the header Authorization. A request without this gets it from a .netrc file."""
    request.headers.pop("Authorization", None)
    if header:
        request.headers["Authorization"] = header
    return request


def _chunks(response: requests.Response) -> Iterator[bytes]:
    """Yield the body of a response; raise Unavailable if it ends early, Interrupted if asked to stop."""
    try:
        while chunk := response.raw.read1(READ_BYTES):
            if stop.requested:
                raise Interrupted
            yield chunk
    except HTTPError as error:
        raise Unavailable(error) from error


def _reason(response: requests.Response) -> str:
    """Return status, code and message of a response for an error."""
    try:
        errors = [
            f"{error['code']} {error.get('message', '')}".strip()
            for error in response.json()["errors"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RequestException):
        errors = [response.reason or ""]
    return f"status {response.status_code}: {', '.join(errors)}"
