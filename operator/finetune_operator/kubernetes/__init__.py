"""A Kubernetes cluster: an attempt is a Job, a workspace is a PersistentVolumeClaim.

`api` asks the API server; `books` keeps what the watches tell; `job`, `volume` and `seen` are pure translations
between Kubernetes' objects and our words; `cluster` puts them together.
"""
