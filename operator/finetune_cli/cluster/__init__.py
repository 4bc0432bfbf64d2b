"""The commands on a cluster, one module each: `run` returns the exit code.

Imported only for a cluster, because the Kubernetes client takes long to import.
"""
