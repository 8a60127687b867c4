"""The oracle: the exact meaning of a case, computed from scratch in NumPy.

No engine may import it.
"""
