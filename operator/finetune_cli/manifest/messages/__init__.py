"""Messages about a manifest: what is wrong with a value, and what to write in its place."""
