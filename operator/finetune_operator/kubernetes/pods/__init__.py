"""HTTP requests to the operator's own pods: progress and probes."""
