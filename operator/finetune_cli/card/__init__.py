"""The run card: a page of HTML about a run, from its status, its metrics and its samples. Pure: no clock, no client."""
