"""Training that continues with other workers when some end: who takes part, decided in one place; no torch."""
