"""Faults of attention: masks, metadata, split parts and operator calls."""
