"""Where pipelines live and Jobs run: one protocol, one module for each kind of place."""
