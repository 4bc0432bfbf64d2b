"""The model in training: its forward pass, loss, attention between documents, dropout and LoRA kernels."""
