"""Padding of the lanes of a batch."""
