"""The process of a stage: from its config to a result, a termination message and an exit code."""
