"""Kubernetes objects built from a pipeline: pure functions."""
