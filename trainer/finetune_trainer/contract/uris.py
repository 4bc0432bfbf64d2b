"""URIs of models, data, tasks and targets: the pattern of each store, and the stores that a field accepts."""

import re
from typing import Annotated

from pydantic import AfterValidator, StringConstraints

FORMS: dict[str, tuple[str, str]] = {
    "hf": (r"hf://[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@\S+)?", "hf://ORG/NAME"),
    "hf-file": (
        r"hf://[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[^\s/]+)?(/\S+)?",
        "hf://ORG/NAME[/PATH]",
    ),
    "s3": (r"s3://[a-z0-9][a-z0-9.-]*(/\S*)?", "s3://BUCKET/PATH"),
    "gs": (r"gs://[a-z0-9][\w.-]*(/\S*)?", "gs://BUCKET/PATH"),
    "az": (r"az://[a-z0-9$][a-z0-9-]*(/\S*)?", "az://CONTAINER/PATH"),
    "oci": (r"oci://[^\s/]+/\S+", "oci://HOST/REPOSITORY"),
    "https": (r"https?://[^\s/?#@]+/\S+", "https://HOST/FILE without a user name"),
    "pvc": (r"pvc://[a-z0-9][a-z0-9.-]*(/\S*)?", "pvc://CLAIM/PATH"),
    "file": (r"file://\S+", "file:///PATH"),
    "path": (r"[A-Za-z0-9_.][^\s:]*", "a path relative to the manifest"),
    # Targets to publish to have no revision and no digest, and are never the root of a bucket or a claim.
    "to-hf": (r"hf://[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", "hf://ORG/NAME"),
    "to-s3": (r"s3://[a-z0-9][a-z0-9.-]*/[^\s/]\S*", "s3://BUCKET/PATH"),
    "to-gs": (r"gs://[a-z0-9][\w.-]*/[^\s/]\S*", "gs://BUCKET/PATH"),
    "to-az": (r"az://[a-z0-9$][a-z0-9-]*/[^\s/]\S*", "az://CONTAINER/PATH"),
    "to-oci": (r"oci://[^\s/@]+/[^\s@]+", "oci://HOST/REPOSITORY[:TAG]"),
    "to-pvc": (r"pvc://[a-z0-9][a-z0-9.-]*/[^\s/]\S*", "pvc://CLAIM/PATH"),
}
"""Store -> the pattern of its URIs, and their form in messages."""
LOCAL = ("pvc", "file", "path")
STORES = ("s3", "gs", "az", "oci")


ON_THIS_MACHINE = frozenset({"", "file", "pvc"})
"""Schemes of paths, also of paths on claims; all other schemes name stores."""
HUB_URI = re.compile(
    r"hf://(?P<id>[A-Za-z0-9][\w.-]{0,95}(?<![.-])/[A-Za-z0-9][\w.-]{0,95}(?<![.-]))(@(?P<revision>[^/]+))?(/.*)?",
    re.ASCII,
)
"""Matches hf://ORG/NAME[@REVISION][/PATH] with an ORG/NAME that the hub accepts."""
WEB_ADDRESS = re.compile(
    r"(https?://|url: /)(?:[^\s/?#]*@)?([^\s?#]*)(?:[?#]\S*?(?=[:;,.)]*(?:\s|$)))?"
)
"""Matches an address in a text. The library `requests` writes the path of an address behind `url: `."""


def scheme_of(uri: str) -> str:
    """Return the scheme of a URI, empty for a path."""
    scheme, separator, _ = uri.partition("://")
    if not separator:
        return ""
    return scheme


def without_secrets(text: object) -> str:
    """Return a URI or a message without user names, passwords and queries: a query may be a signature.

    Only addresses with https:// and http:// have them. In other URIs, a question mark is a part of a pattern.
    """
    return WEB_ADDRESS.sub(r"\1\2", str(text))


def hub_id(uri: str) -> str | None:
    """Return ORG/NAME of a URI hf://ORG/NAME[@REVISION][/PATH]; None for other places, and names that no hub has."""
    match = HUB_URI.fullmatch(uri)
    if match is None:
        return None
    name = match["id"]
    # The hub refuses these in a model card, as huggingface_hub's validate_repo_id does.
    if "--" in name or ".." in name or name.endswith(".git"):
        return None
    return name


def hub_revision(uri: str, revision: str | None) -> str | None:
    """Return the revision of a repository of the hub, from its URI or the field beside that; None for other places."""
    match = HUB_URI.fullmatch(uri)
    if match is None:
        return None
    return match["revision"] or revision


def pattern_of(*stores: str) -> str:
    """Return the pattern of the URIs of these stores."""
    return f"^({'|'.join(FORMS[store][0] for store in stores)})$"


def description_of(*stores: str) -> str:
    """Return the forms of the URIs of these stores, for a message."""
    *first, last = (FORMS[store][1] for store in stores)
    return f"must be {', '.join(first)} or {last}, without spaces"


MODEL = ("hf", *STORES, *LOCAL)
DATA = ("hf-file", *STORES, "https", *LOCAL)
TASK_FILE = LOCAL
TARGET = ("to-hf", "to-s3", "to-gs", "to-az", "to-oci", "to-pvc", "file", "path")
DESCRIPTIONS = {
    pattern_of(*stores): description_of(*stores)
    for stores in (MODEL, DATA, TASK_FILE, TARGET)
}
"""Pattern of a field -> the message about a value that does not match it."""


def check_inside_claim(uri: str) -> str:
    """Raise ValueError for a pvc:// URI whose path leaves the claim."""
    # Not in the pattern: regular expressions of a CRD have no look-ahead.
    if uri.startswith("pvc://") and ".." in uri.split("/"):
        raise ValueError("leaves the claim: remove .. from its path")
    return uri


def check_repository(uri: str) -> str:
    """Raise ValueError for a URI with the kind of the repository before its name, as in hf://datasets/ORG/NAME."""
    # Not in the pattern either. The hub has no organisations of these names.
    match = re.match(r"hf://(?:datasets|models|spaces)/(.+)", uri)
    if match:
        name = match[1]
        if "/" not in name:
            name = f"ORG/{name}"
        raise ValueError(
            f"a hub URI is hf://ORG/NAME, without the kind: write hf://{name}"
        )
    return check_inside_claim(uri)


def _bounded(pattern: str, length: int = 1024) -> StringConstraints:
    return StringConstraints(min_length=1, max_length=length, pattern=pattern)


ModelUri = Annotated[
    str, _bounded(pattern_of(*MODEL)), AfterValidator(check_repository)
]
DataUri = Annotated[str, _bounded(pattern_of(*DATA)), AfterValidator(check_repository)]
TaskUri = Annotated[
    str, _bounded(pattern_of(*TASK_FILE)), AfterValidator(check_repository)
]
FolderUri = Annotated[
    str, _bounded(pattern_of(*LOCAL)), AfterValidator(check_repository)
]
# Results have the URIs of all targets twice, and a termination message has 4,096 bytes.
TargetUri = Annotated[
    str, _bounded(pattern_of(*TARGET), 256), AfterValidator(check_repository)
]
