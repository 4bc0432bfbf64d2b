"""Kubernetes objects and API errors read into the terms of core: pure functions."""
