"""Tensor parallelism: which part of a model each rank holds, and what a rank reveals of its run."""
