"""Training objectives: the interface, its implementations and the registry of their names."""
