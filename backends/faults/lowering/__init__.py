"""Faults of lowering: index tensors of a tree, and chunks."""
