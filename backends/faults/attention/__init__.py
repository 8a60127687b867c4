"""Faults of attention: masks, forward metadata, split parts and operator calls."""
