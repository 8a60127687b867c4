"""Tensor parallelism: a target over several ranks that stay in step."""
