"""Records of a data set, their conversations and chat templates."""
