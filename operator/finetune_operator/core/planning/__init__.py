"""The plan of a pipeline: its actions, when it is reconciled again, and what is removed."""
