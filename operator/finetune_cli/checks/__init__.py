"""Checks before a run: data sources, stores, tasks and the files of tasks."""
