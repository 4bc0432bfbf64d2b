"""The JSON of an object of the Kubernetes API."""

from typing import Any

Object = dict[str, Any]
