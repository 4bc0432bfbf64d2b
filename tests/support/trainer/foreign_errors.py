"""The traces that an error of another program leaves in a message."""

import re

FOREIGN = re.compile(r"Traceback|Exception\b|\b[A-Z]\w+Error\b|<class |object at 0x")
"""A class of errors, or an object as Python writes it: a sentence of ours has none."""
