"""Stores of models and data sets: folders, object stores, the Hugging Face hub and OCI registries.

`port.py` is the page to read first. Each other module is one adapter, or serves all adapters.
"""
