"""Runs beside each other: what differs in their manifests, and what was measured."""
