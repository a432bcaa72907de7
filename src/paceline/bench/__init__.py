"""Experiments: a grid of runs from a TOML file, made one after another, stopped and resumed."""
