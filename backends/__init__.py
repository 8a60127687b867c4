"""The engines under test, and the registry that opens them.

A backend uses the data types of `reference` (cases, trees, traces). It never imports the oracle's answers
(`specverify.reference.oracle`) and never writes the sentences of a report.
"""

if __name__ != "specverify.backends":
    raise ImportError(f"{__file__} is the package specverify.backends, which has no other import name")
