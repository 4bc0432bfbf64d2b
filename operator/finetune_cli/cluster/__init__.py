"""The commands on a cluster, one module each: `run` gives the exit code. Imported only when a cluster is meant."""
