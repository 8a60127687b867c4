"""Faults of lowering: index tensors of a tree, masks, positions and chunks."""
