"""Tensor parallelism: a target over several ranks, and sampling in which all ranks stay in step."""
