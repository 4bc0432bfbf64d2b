"""The pure core: assess → plan → report. It uses no clock, no client, no kopf and no randomness."""
