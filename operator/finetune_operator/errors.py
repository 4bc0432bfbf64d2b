"""What can go wrong between the operator and its cluster, named by what to do about it."""


class ClusterError(Exception):
    """Look again later: the pipeline stays as it is."""


class Conflict(ClusterError):
    """Somebody else changed the object since it was read: read it again."""


class InvalidObject(ClusterError):
    """The object itself is beyond us: wait until somebody changes it."""
