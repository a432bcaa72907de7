"""A model in stages: where to cut it, in which order the stages work, and the executor that does it."""
