"""Our images: built with docker or buildah, whichever is there, and exported for nodes that have no registry."""
