"""Configs of other training tools as manifests: a table for each tool, setting -> what it means here."""
