"""Reports: findings as a terminal page, JSON lines, JUnit XML and bundles.

Only this package turns facts into sentences; it decides nothing about a case.
"""

if __name__ != "specverify.reports":
    raise ImportError(f"{__file__} is the package specverify.reports, which has no other import name")
