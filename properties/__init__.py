"""Properties: what may be drawn, what must hold, and the verdict on a case.

Strategies draw cases, invariants state what must hold. Nothing here imports torch or writes prose.
"""

if __name__ != "specverify.properties":
    raise ImportError(f"{__file__} is the package specverify.properties, which has no other import name")
