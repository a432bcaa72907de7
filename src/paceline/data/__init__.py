"""Data sets, their sources and checksums."""
