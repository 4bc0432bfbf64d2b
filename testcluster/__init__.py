"""Kubernetes on one machine for tests, with nodes that can be evicted, partitioned and killed; see README.md."""
