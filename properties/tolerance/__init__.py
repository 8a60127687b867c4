"""Tolerance: how far a row may lie from the oracle's, and when another token is a tie."""
