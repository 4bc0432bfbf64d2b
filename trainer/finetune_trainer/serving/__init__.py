"""The pushed model behind an OpenAI-compatible endpoint of this machine."""
