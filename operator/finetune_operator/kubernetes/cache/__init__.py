"""The objects that lists, watches and answers of the API server delivered."""
