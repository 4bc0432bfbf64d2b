"""Names of files in a work folder. Nothing is imported here: completion in a shell has no time for it."""

PIPELINE_FILE = "pipeline.json"
"""The object with its status."""
