"""Tensor parallelism: the parts of ranks, and the records of their runs."""
