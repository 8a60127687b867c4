"""Interception: an unmodified sampler's random draws are forked, so that its law is exact."""
