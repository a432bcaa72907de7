"""Faults for a training under way, in a random order that a seed repeats, and what they cost it; no torch."""
