"""The words (Tree, KvLayout, Sampling, Case, Trace) and what they mean: slow, exact, NumPy."""
