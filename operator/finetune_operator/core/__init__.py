"""The pure core: observe → assess → plan → report, without a clock, a client, kopf or randomness."""
