"""A Kubernetes cluster on this machine, with nodes that can be evicted, cut off and killed; see README.md."""
