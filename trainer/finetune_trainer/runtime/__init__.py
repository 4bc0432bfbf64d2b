"""The runtime of a stage's process: config, stage folder, progress, artifacts, sources and errors."""
