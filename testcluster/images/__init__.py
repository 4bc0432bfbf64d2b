"""Images: built with docker or buildah, and exported as archives that nodes load without a registry."""
