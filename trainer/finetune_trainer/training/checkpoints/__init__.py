"""Checkpoints: their format, the manager that writes them, and the reader that verifies them."""
