"""Predicts step times at numbers of workers, links and strategies that nobody has run yet; no torch."""
