"""Runs on this machine: the reconcile loop over processes and folders."""
