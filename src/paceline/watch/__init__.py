"""A live page of a run that is under way, on loopback."""
