"""The parts of the training loop: batches, model, optimizer, validation, state and checkpoints."""
