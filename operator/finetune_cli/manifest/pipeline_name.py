"""The name of a pipeline that is made from the name of something else, such as its data or a config."""

import re

# The longest that Kubernetes' 63 characters for the name of a Job leave uncut: NAME-UID8-evaluate-a999.
MAX_NAME = 40
"""Longest such name."""


def pipeline_name(text: str) -> str:
    """Return a text as Kubernetes allows it for a name; empty if nothing of it is left."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return "-".join(words)[:MAX_NAME].rstrip("-")
