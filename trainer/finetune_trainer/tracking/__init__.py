"""Metrics of a training run: the file that holds them, and the experiment trackers that receive them.

To add a tracker, add its settings to `contract/tracking.py`, a file here with its class, and a line in `registry.py`.
"""
