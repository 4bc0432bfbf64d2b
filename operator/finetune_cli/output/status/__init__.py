"""The status of a pipeline: as a line, as a tree, and live with its failures."""
