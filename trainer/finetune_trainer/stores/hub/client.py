"""Requests to a repository of the Hugging Face hub, and the stage errors for the hub's errors.

`HF_ENDPOINT` names another hub than huggingface.co, `HF_TOKEN` the token.
"""

import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import httpx2
from huggingface_hub import (
    HfApi,
    constants,
    get_session,
    hf_hub_url,
    hf_raise_for_status,
    set_client_factory,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile

# Private, because huggingface_hub.utils exports it at run time only: type checkers do not find it there.
from huggingface_hub.utils._headers import build_hf_headers

# Private, because the library exports only the setter of the factory. A client made without it would lack the hook
# that sets the id of each request and refuses requests while HF_HUB_OFFLINE is set.
from huggingface_hub.utils._http import default_client_factory
from huggingface_hub.utils.tqdm import disable_progress_bars

from finetune_trainer.contract.uris import without_secrets
from finetune_trainer.runtime.errors import (
    ConfigInvalid,
    CredentialsRejected,
    DataInvalid,
    MachineUnable,
    Offline,
    ServiceUnavailable,
    SourceNotFound,
    StageError,
)
from finetune_trainer.runtime.machine.space import FULL
from finetune_trainer.stores.hub.cached import CachedRepository, is_offline

RepositoryType = Literal["model", "dataset"]

CONNECT_SECONDS = 10.0
# A large commit takes the hub tens of seconds, in which it sends nothing.
SILENCE_SECONDS = 120.0
"""Time without a byte after which a request has failed."""
TEMPORARY_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
# Errors of xet's client have the status in their message only.
XET_REFUSAL = re.compile(r"HTTP status client error \((401|403) ")
URI = re.compile(
    r"hf://(?P<name>[^/@]+(/[^/@]+)?)(@(?P<revision>[^/]+))?(/(?P<path>.*))?"
)


@dataclass(frozen=True)
class HubUri:
    """The parts of hf://ORG/NAME[@REVISION][/PATH]."""

    name: str
    revision: str | None
    path: str

    @classmethod
    def parse(cls, uri: str) -> "HubUri":
        """Return the parts of a URI; raise ConfigInvalid if it names no repository."""
        match = URI.fullmatch(uri.rstrip("/"))
        path = match["path"] if match else None
        segments = path.split("/") if path else []
        if match is None or {"", ".", ".."} & set(segments):
            raise ConfigInvalid(
                f"{uri} names no repository of the hub; use hf://ORG/NAME or hf://ORG/NAME/PATH"
            )
        return cls(match["name"], match["revision"], path or "")


@dataclass(frozen=True)
class HubRepository:
    """One repository, as the process's environment reaches it."""

    uri: str
    """The URI of the manifest, for messages."""
    name: str
    """ORG/NAME."""
    type: RepositoryType

    @property
    def endpoint(self) -> str:
        """Return the address of the hub, which tests and mirrors set in the environment."""
        # Read at each call: the library reads the variable only when it is imported.
        return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")

    @property
    def api(self) -> HfApi:
        """Return the client of the hub's library, with limits on how long it waits."""
        limit_waiting()
        return HfApi(endpoint=self.endpoint)

    @property
    def page(self) -> str:
        """Return the address of the repository for a browser."""
        folder = "datasets/" if self.type == "dataset" else ""
        return f"{self.endpoint}/{folder}{self.name}"

    @property
    def cached(self) -> CachedRepository:
        """Return the files of this repository that the machine has already."""
        return CachedRepository(self.name, self.type)

    def commit_of(self, revision: str | None) -> str:
        """Return the commit that a branch, a tag or a commit names now. None stands for main.

        Raise Offline if HF_HUB_OFFLINE is set and the Hugging Face cache does not have it.
        """
        if is_offline():
            commit = self.cached.commit_of(revision)
            if commit is None:
                raise self._offline()
            return commit
        info = self.api.repo_info(self.name, repo_type=self.type, revision=revision)
        commit = info.sha
        if not commit:
            raise ServiceUnavailable(
                f"{self.uri}: the hub at {self.endpoint} names no commit of {revision or 'main'}"
            )
        return str(commit)

    def files(
        self, commit: str, folder: str = "", *, recursive: bool = True
    ) -> Iterator[RepoFile]:
        """Yield the files below a folder of a commit, with their paths in the repository.

        Raise DataInvalid if a path would leave the folder of a download: git has no such paths.
        """
        if is_offline():
            yield from self._cached_files(commit, folder, recursive=recursive)
            return
        entries = self.api.list_repo_tree(
            self.name,
            folder or None,
            recursive=recursive,
            revision=commit,
            repo_type=self.type,
        )
        for entry in entries:
            if not isinstance(entry, RepoFile):
                continue
            # HF_ENDPOINT may name any server. It must not choose where a download is written.
            segments = set(entry.path.split("/"))
            is_path = not {"", ".", ".."} & segments
            if not is_path or "\\" in entry.path:
                raise DataInvalid(
                    f"{self.uri}: {self.endpoint} lists {entry.path!r}, which is no path; use another hub"
                )
            yield entry

    def _cached_files(
        self, commit: str, folder: str, *, recursive: bool
    ) -> Iterator[RepoFile]:
        if self.cached.commit_of(commit) is None:
            raise self._offline()
        for entry in self.cached.files(commit):
            parent = entry.path.rpartition("/")[0]
            is_below = recursive and (
                f"{parent}/".startswith(f"{folder}/") or not folder
            )
            if parent == folder or is_below:
                yield entry

    def _offline(self) -> Offline:
        return Offline(
            f"{self.uri}: HF_HUB_OFFLINE is set, and the Hugging Face cache lacks it; "
            f"unset it to reach {self.endpoint}, or fetch it first: hf download {self.name}"
        )

    def url(self, path: str, commit: str) -> str:
        """Return the address of a file."""
        return hf_hub_url(
            self.name,
            path,
            repo_type=self.type,
            revision=commit,
            endpoint=self.endpoint,
        )

    def read(self, path: str, commit: str) -> bytes:
        """Return the content of a small file."""
        if is_offline():
            return self.cached.read(path, commit)
        limit_waiting()
        url = self.url(path, commit)
        response = get_session().get(url, headers=build_hf_headers())
        hf_raise_for_status(response)
        return bytes(response.content)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn errors of the hub's library and of the connection into stage errors."""
        try:
            yield
        except StageError:
            raise
        except (
            httpx2.HTTPError,
            OSError,
            EntryNotFoundError,
            RuntimeError,
            ValueError,
        ) as error:
            raise self._stage_error(error) from error

    def _stage_error(self, error: BaseException) -> StageError:
        if isinstance(error, HfHubHTTPError):
            return self._error_of_answer(error)
        cause = error.__cause__
        if isinstance(error, RuntimeError | ValueError) and isinstance(
            cause, httpx2.HTTPError | OSError
        ):
            # The hub's library names only the file. Its cause names the failure.
            return self._stage_error(cause)
        kind: type[StageError] = ServiceUnavailable
        match error:
            case HFValidationError():
                kind = ConfigInvalid
                problem = f"the hub has no such name: {error}; use hf://ORG/NAME"
            case OfflineModeIsEnabled():
                kind = MachineUnable
                problem = f"HF_HUB_OFFLINE is set; unset it to reach {self.endpoint}"
            case httpx2.ConnectError():
                # The name of the host is not known, or nothing answers there: a person looks at the network.
                kind = MachineUnable
                problem = f"{self.endpoint} cannot be reached: {error}; check the network and retry"
            case OSError(errno=None) | RuntimeError() if _is_refusal_of_xet(error):
                kind = CredentialsRejected
                problem = (
                    f"the hub's storage refuses access: {error}; set HF_TOKEN again"
                )
            # The libraries raise errors of connections without a number. A number is of a failed write to the disk.
            case OSError(errno=number) if number is not None:
                kind = MachineUnable if number in FULL else ServiceUnavailable
                problem = f"cannot write: {error}; free some space and retry"
            case ConnectionError() | RuntimeError() | ValueError():
                problem = (
                    f"the transfer with {self.endpoint} failed: {error}; retry later"
                )
            case _:
                problem = f"{self.endpoint} does not respond: {error!r}; retry later"
        return kind(f"{self.uri}: {without_secrets(problem)}")

    def _error_of_answer(self, error: HfHubHTTPError) -> StageError:
        status = error.response.status_code
        answer = f"{self.uri}: the hub answers {status}: {error.server_message or type(error).__name__}"
        if isinstance(error, GatedRepoError):
            return CredentialsRejected(
                f"{answer}: access is by licence: accept it at {self.page}, "
                "and set HF_TOKEN in envFrom to a token of that account"
            )
        match status:
            case 401:
                return CredentialsRejected(
                    f"{answer}: the repository is private or does not exist, or HF_TOKEN is wrong or missing; "
                    "correct the name, or set HF_TOKEN in envFrom to a token that may access it"
                )
            case 403:
                return CredentialsRejected(
                    f"{answer}: HF_TOKEN lacks a permission; use a token that has it"
                )
            case 404:
                return SourceNotFound(f"{answer}: {self._fix(error)}")
            case _ if status in TEMPORARY_STATUSES:
                return ServiceUnavailable(f"{answer}; retry later")
            case _:
                return ConfigInvalid(f"{answer}; correct what the hub refuses")

    def _fix(self, error: HfHubHTTPError) -> str:
        if isinstance(error, RevisionNotFoundError):
            return (
                f"correct the revision: {self.page} has no such branch, tag or commit"
            )
        if isinstance(error, EntryNotFoundError):
            return f"correct the path: {self.page} has no such file at this revision"
        return f"correct the name: there is no {self.type} {self.name} that this HF_TOKEN may see"


def _is_refusal_of_xet(error: BaseException) -> bool:
    """Return whether an error of xet's client, which has no number, is the refusal of a token."""
    if isinstance(error, PermissionError):
        return True
    return XET_REFUSAL.search(str(error)) is not None


@functools.cache
def limit_waiting() -> None:
    """Bound the wait of every request: the hub's library waits for ever. Turn off its progress bars."""
    disable_progress_bars()
    set_client_factory(_bounded_client)


def _bounded_client() -> httpx2.Client:
    client = default_client_factory()
    # A hook for each request: the library passes some requests a timeout of None, which overrides the client's own.
    hooks = [*client.event_hooks["request"], _bound_wait]
    client.event_hooks = {"request": hooks, "response": []}
    return client


def _bound_wait(request: httpx2.Request) -> None:
    limits = {
        "connect": CONNECT_SECONDS,
        "read": SILENCE_SECONDS,
        "write": SILENCE_SECONDS,
        "pool": CONNECT_SECONDS,
    }
    given = request.extensions.get("timeout", {})
    request.extensions["timeout"] = {
        name: given.get(name) or limit for name, limit in limits.items()
    }
