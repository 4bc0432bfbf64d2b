"""Records become tokens, in several processes."""
