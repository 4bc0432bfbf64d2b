"""Training with several processes: ranks, sharded weights, and the processes themselves."""
