"""Reports: findings as a terminal page, JSON lines, JUnit XML and bundles.

Only this package turns facts into sentences; it decides nothing about a case.
"""
