"""Advice on whether and how to distribute a training, from short runs and predictions."""
