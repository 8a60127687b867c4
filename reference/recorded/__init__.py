"""Recorded traces: the format in which any engine writes its runs."""
