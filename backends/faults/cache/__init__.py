"""Faults of the KV cache: commits, layouts, pages and their release."""
