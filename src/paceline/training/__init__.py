"""The driver of a training, its progress output and its records."""
