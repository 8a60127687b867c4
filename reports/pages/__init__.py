"""The pages that a person reads, at 80 columns."""
