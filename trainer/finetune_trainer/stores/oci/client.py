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
    MachineUnable,
    ServiceUnavailable,
    SourceNotFound,
)
from finetune_trainer.stop_signal import stop
from finetune_trainer.stores.oci.credentials import Authorization, is_plain
from finetune_trainer.stores.oci.image import MANIFEST_TYPE, ImageName

RETRY_SECONDS = 60.0
"""Time from the first failure of a request to the last attempt."""
FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 16.0
STOP_POLL_SECONDS = 0.25
TIMEOUT_SECONDS = (10.0, 30.0)
"""To connect, and for each read."""
# A registry may copy the blob before it answers the end of an upload.
COMMIT_TIMEOUT_SECONDS = (30.0, 300.0)
"""The same for the end of an upload."""
READ_BYTES = 1 << 20
"""The most bytes that a read returns."""
# The distribution protocol names this limit.
LARGEST_MANIFEST = 4 << 20
"""Bytes."""

# Images of Docker Hub have the name of its web site.
API_HOSTS = {"docker.io": "registry-1.docker.io"}
"""Hosts of registries that have another name in images."""

MANIFEST_TYPES = (
    MANIFEST_TYPE,
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
# The registry was restarted or cleaned, or bytes were damaged on the way.
UPLOAD_LOST = re.compile(
    "BLOB_UNKNOWN|BLOB_UPLOAD_UNKNOWN|BLOB_UPLOAD_INVALID|DIGEST_INVALID|SIZE_INVALID"
)
"""Codes of errors after which the same push may succeed."""
NOTHING_THERE = frozenset(
    {HTTPStatus.NOT_FOUND, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE}
)
"""Statuses for a name, or a part of a blob, that the registry does not have."""
WRONG_TLS = {
    "CERTIFICATE_VERIFY_FAILED": "set SSL_CERT_FILE to the certificates of its authority",
    "WRONG_VERSION_NUMBER": f"if it has no TLS, add the host to {INSECURE_REGISTRIES}",
}

NO_CONNECTION = requests.exceptions.ConnectionError
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
        scheme = "http" if is_plain(image.host) else "https"
        host = API_HOSTS.get(image.host, image.host)
        self._origin = f"{scheme}://{host}"
        self._base = f"{self._origin}/v2/{image.repository}"
        self._authorization = Authorization(image.host, image.repository)
        self._session = requests.Session()
        # OpenSSL and httpx read this variable, requests only a variable of its own.
        self._session.verify = os.environ.get("SSL_CERT_FILE") or True
        # Sizes and ranges count the stored bytes, so the registry must not compress them.
        self._session.headers["Accept-Encoding"] = "identity"
        # A registry that is also a web site takes a client with its cookies for a browser.
        no_cookies = DefaultCookiePolicy(allowed_domains=[])
        self._session.cookies.set_policy(no_cookies)

    def manifest(self, reference: str) -> bytes | None:
        """Return the manifest of a tag or a digest, or None if there is none."""
        url = f"{self._base}/manifests/{reference}"
        # Also the types that no push writes: an image of another program must be known as foreign.
        headers = {"Accept": ", ".join(MANIFEST_TYPES)}

        def attempt() -> bytes | None:
            with closing(
                self._send("GET", url, headers=headers, stream=True)
            ) as response:
                if response.status_code == HTTPStatus.NOT_FOUND:
                    return None
                content = b""
                for chunk in _chunks(response):
                    content += chunk
                    if len(content) > LARGEST_MANIFEST:
                        raise ConfigInvalid(
                            f"{self.uri}: its manifest is larger than {LARGEST_MANIFEST:,} bytes"
                        )
            return content

        return self._repeat(attempt)

    def put_manifest(self, reference: str, manifest: bytes) -> None:
        """Store a manifest under a tag or its digest."""
        url = f"{self._base}/manifests/{reference}"
        headers = {"Content-Type": MANIFEST_TYPE}
        self._repeat(lambda: self._put(url, manifest, headers))

    def blob_size(self, digest: str, expected: int) -> int | None:
        """Return the size of a blob in bytes; the expected size if the registry does not say; None without a blob."""

        def attempt() -> int | None:
            response = self._send("HEAD", f"{self._base}/blobs/{digest}")
            if response.status_code == HTTPStatus.NOT_FOUND:
                return None
            return int(response.headers.get("Content-Length", expected))

        return self._repeat(attempt)

    def upload(self, digest: str, content: Iterable[bytes] | bytes) -> None:
        """Store a blob. The content has a length and can be read again: each attempt sends it from its beginning."""

        def attempt() -> None:
            opened = self._send("POST", f"{self._base}/blobs/uploads/")
            if opened.status_code == HTTPStatus.NOT_FOUND:
                raise SourceNotFound(
                    f"{self.uri}: the registry has no such repository: {_reason(opened)}; create it"
                )
            # The address may be relative, and may have a query with the state of the upload.
            location = urljoin(opened.url, opened.headers.get("Location", ""))
            separator = "&" if urlsplit(location).query else "?"
            url = f"{location}{separator}{urlencode({'digest': digest})}"
            self._put(url, content, {"Content-Type": "application/octet-stream"})

        self._repeat(attempt)

    def _put(
        self, url: str, content: Iterable[bytes] | bytes, headers: dict[str, str]
    ) -> None:
        answer = self._send(
            "PUT", url, headers=headers, data=content, timeout=COMMIT_TIMEOUT_SECONDS
        )
        # The registry has forgotten the upload, or a blob of the manifest. Another attempt begins anew.
        if answer.status_code == HTTPStatus.NOT_FOUND:
            raise Unavailable(_reason(answer))

    def read_blob(self, digest: str, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes of a blob from `start` to `end`, or to the blob's end; nothing if there is no such blob.

        Raise Unavailable if the connection fails or ends early.
        """
        url = f"{self._base}/blobs/{digest}"
        headers = {"Range": f"bytes={start}-{end - 1}"}
        with closing(self._send("GET", url, headers=headers, stream=True)) as response:
            if response.status_code in NOTHING_THERE:
                return
            # A registry that knows no ranges sends the blob from its beginning.
            position = 0
            if response.status_code == HTTPStatus.PARTIAL_CONTENT:
                position = start
            for chunk in _chunks(response):
                first = max(0, start - position)
                last = max(0, end - position)
                yield chunk[first:last]
                position += len(chunk)
                # The rest belongs to another file, or is endless. The digest shows if bytes are wrong.
                if position >= end:
                    return

    def _send(self, method: str, url: str, **options: Any) -> requests.Response:
        """Return the response to a request, which succeeded or found nothing. Raise Unavailable if it may later."""
        # The header as it is now: another thread may replace it while this request is under way.
        used = self._authorization.header
        response = self._once(method, url, self._authorize, **options)
        if (
            response.status_code == HTTPStatus.UNAUTHORIZED
            and "WWW-Authenticate" in response.headers
        ):
            response.close()
            challenge = response.headers["WWW-Authenticate"]
            self._authorization.answer(challenge, used, self._get_token)
            response = self._once(method, url, self._authorize, **options)
        self._check(response)
        return response

    def _get_token(
        self, url: str, query: dict[str, str], header: str | None
    ) -> requests.Response:
        response = self._once(
            "GET", url, lambda request: _with_header(request, header), params=query
        )
        _check_available(response)
        return response

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        """Set the header for the registry itself only: an upload may go to another host."""
        address = urlsplit(request.url or "")
        own = urlsplit(self._origin)
        is_own = address.scheme == own.scheme and address.netloc == own.netloc
        if is_own:
            return _with_header(request, self._authorization.header)
        return _with_header(request, None)

    def _once(
        self, method: str, url: str, authorize: Authorize, **options: Any
    ) -> requests.Response:
        options.setdefault("timeout", TIMEOUT_SECONDS)
        try:
            return self._session.request(method, url, auth=authorize, **options)
        except SSLError as error:
            # A wrong certificate stays wrong, and a connection that broke in the handshake may not.
            for code, fix in WRONG_TLS.items():
                if code in str(error):
                    raise ConfigInvalid(
                        f"{self.uri}: no TLS connection: {without_secrets(error)}; {fix}"
                    ) from None
            raise Unavailable(error) from error
        except RequestException as error:
            raise Unavailable(error) from error

    def _check(self, response: requests.Response) -> None:
        """Raise the error that a response stands for. A response without the named content is no error."""
        _check_available(response)
        if response.status_code in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            raise CredentialsRejected(
                f"{self.uri}: the registry refuses {response.request.method}: {_reason(response)}; "
                "correct the name, or use credentials that may do this"
            )
        is_error = response.status_code >= HTTPStatus.BAD_REQUEST
        if is_error and response.status_code not in NOTHING_THERE:
            reason = _reason(response)
            if UPLOAD_LOST.search(reason):
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
        # A registry that names a pause would refuse an earlier request.
        pause = self._pause if problem.pause is None else problem.pause
        if now + pause > self._end:
            no_connection = isinstance(problem.__cause__, NO_CONNECTION)
            kind = MachineUnable if no_connection else ServiceUnavailable
            raise kind(
                f"{self._uri}: the registry does not serve: {without_secrets(problem)}; retry later"
            ) from problem
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        end = now + pause
        while time.monotonic() < end:
            if stop.requested:
                raise Interrupted
            left = max(0.0, end - time.monotonic())
            time.sleep(min(left, STOP_POLL_SECONDS))


def _check_available(response: requests.Response) -> None:
    """Raise Unavailable for a response that a later request may not get."""
    status = response.status_code
    busy = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.REQUEST_TIMEOUT}
    if status in busy or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise Unavailable(_reason(response), _retry_after(response))


def _retry_after(response: requests.Response) -> float | None:
    """Return the seconds that the header Retry-After asks for, which has a number or a date."""
    value = response.headers.get("Retry-After", "")
    if value.isdigit():
        return float(value)
    try:
        until = parsedate_to_datetime(value)
        # Not the clock of this machine, which may differ from the registry's.
        now = parsedate_to_datetime(response.headers["Date"])
        return max(0.0, (until - now).total_seconds())
    except (ValueError, KeyError, TypeError):
        return None


def _with_header(
    request: requests.PreparedRequest, header: str | None
) -> requests.PreparedRequest:
    """Set or remove the header Authorization."""
    # Without this, requests would take credentials from a .netrc file.
    request.headers.pop("Authorization", None)
    if header:
        request.headers["Authorization"] = header
    return request


def _chunks(response: requests.Response) -> Iterator[bytes]:
    """Yield the body of a response; raise Unavailable if it ends early, Interrupted if asked to stop."""
    try:
        # read1 returns the bytes that have arrived, so a connection that ends early loses nothing.
        while chunk := response.raw.read1(READ_BYTES):
            if stop.requested:
                raise Interrupted
            yield chunk
    except HTTPError as error:
        raise Unavailable(error) from error


def _reason(response: requests.Response) -> str:
    """Return status, code and message of a response for an error."""
    try:
        errors = []
        for error in response.json()["errors"]:
            text = f"{error['code']} {error.get('message', '')}"
            errors.append(text.strip())
    # A proxy in front of the registry answers without the JSON of the protocol.
    except (ValueError, KeyError, TypeError, AttributeError, RequestException):
        errors = [response.reason or ""]
    return f"status {response.status_code}: {', '.join(errors)}"
