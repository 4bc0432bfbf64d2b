"""A real cluster on this machine, with nodes that can be evicted, cut off and killed; docs/cluster.md tells how."""
