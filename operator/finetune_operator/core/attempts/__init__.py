"""The attempts of a stage: their history, how each ended, what each cost, and the nodes to avoid."""
