"""Evaluators of the oracle's interface on a device, and NumPy's certificate for them."""
