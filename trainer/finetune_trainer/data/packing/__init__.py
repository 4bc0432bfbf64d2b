"""Rows of equal length: the writer of prepare, the reader of train, and the format between them."""
