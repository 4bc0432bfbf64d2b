"""Metrics of a training run: their file, and the experiment trackers that receive them.

To add a tracker, add its settings to `contract/tracking.py`, a file here with its class, and a line in `registry.py`.
"""
