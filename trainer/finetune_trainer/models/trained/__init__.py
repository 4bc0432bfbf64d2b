"""The weights of a trained model: merged or replaced, written, and checked before they are published."""
