"""Every fault that a node, a scheduler, a kernel or a disk can do to a real training on real nodes."""
