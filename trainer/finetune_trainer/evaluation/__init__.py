"""lm-eval: tasks, and a cache of the model's responses."""
