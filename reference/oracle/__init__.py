"""The oracle: what the words mean, computed from scratch in NumPy; no engine may read it."""
