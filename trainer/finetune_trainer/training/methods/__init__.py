"""Training methods (LoRA, QLoRA, Full): which weights are trained, and the registry of the methods."""
