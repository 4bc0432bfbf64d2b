"""A drill: a running stage is evicted on purpose, and what that cost is reported; the same on a cluster and here."""
