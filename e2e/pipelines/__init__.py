"""Tests of the operator on a real cluster, installed with its chart from its built image."""
