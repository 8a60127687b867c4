"""Attention whose way is chosen from a table of measured times."""
