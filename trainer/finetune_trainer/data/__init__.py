"""Records, chat templates, tokens and packed rows."""
