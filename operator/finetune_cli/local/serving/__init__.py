"""Model servers on this machine, and conversations with them."""
