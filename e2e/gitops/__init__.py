"""Pipelines in Git, with real Argo CD and real Flux as processes beside a cluster."""
