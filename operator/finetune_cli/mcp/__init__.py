"""The commands as tools of the Model Context Protocol, for programs that work with a language model."""
