"""The vocabulary of a case, and its exact NumPy semantics.

Tree, KvLayout, Sampling, Case and Trace are the words that every other package uses. `reference.oracle` computes what
they mean, slowly and in float64.
"""
