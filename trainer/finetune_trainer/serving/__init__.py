"""Serving of the pushed model on this machine: an OpenAI-compatible server, and verification of the model."""
