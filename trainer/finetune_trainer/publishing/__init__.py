"""The published model: its card and its metadata."""
