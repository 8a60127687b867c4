"""Interception: the exact law of an unmodified sampler, by forking its draws."""
