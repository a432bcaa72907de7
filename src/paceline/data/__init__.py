"""Datasets, their sources and checksums."""
