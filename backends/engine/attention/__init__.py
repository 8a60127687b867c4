"""Attention of the engine: what the rows of a forward see, and the paths that compute it."""
