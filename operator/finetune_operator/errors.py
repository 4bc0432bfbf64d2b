"""Errors between the operator and its cluster, named for what the caller does with them."""


class ClusterError(Exception):
    """The request failed. Retry later with backoff; the pipeline stays as it is."""


class Conflict(ClusterError):
    """The object was changed by another writer since it was read. Read it again, then retry."""


class InvalidObject(ClusterError):
    """The operator cannot process the object. Do not retry until the user changes it."""


class NewerObject(InvalidObject):
    """The object has fields that a newer CRD declares. Leave it to a newer operator, which may start any moment."""
