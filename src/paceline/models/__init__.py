"""Models: one file per family, and the table of their names; no parallelism in any of them."""
