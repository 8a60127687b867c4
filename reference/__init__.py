"""The vocabulary of a case, and its exact NumPy semantics.

Tree, KvLayout, Sampling, Case and Trace are the words that every other package uses. `specverify.reference.oracle`
computes what they mean, slowly and in float64.
"""

if __name__ != "specverify.reference":
    raise ImportError(f"{__file__} is the package specverify.reference, which has no other import name")
