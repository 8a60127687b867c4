"""Tolerance: how far numbers may lie off, and when another token is a tie."""
