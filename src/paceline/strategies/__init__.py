"""Strategies: how the work of a step is divided over ranks."""
