"""Checkpoints: the state of a training by the names of its tensors, however many ranks wrote it and will read it."""
