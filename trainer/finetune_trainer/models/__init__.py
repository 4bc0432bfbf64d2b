"""Base models: loaded, and merged with an adapter."""
