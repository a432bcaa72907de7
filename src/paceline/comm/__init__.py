"""Communicators: one file per transport behind one protocol."""
