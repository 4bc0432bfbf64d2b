"""Evaluation with lm-eval: loading tasks, and a cache of the model's responses."""
