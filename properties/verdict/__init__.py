"""The verdict: a backend as a subject, invariants asked of a case, and findings."""
