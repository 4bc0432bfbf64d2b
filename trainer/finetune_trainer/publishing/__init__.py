"""The published model: its model card and its metadata."""
