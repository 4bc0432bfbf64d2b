"""HTTP requests to the operator's own pods: progress, which is polled in the background, saves and probes."""
