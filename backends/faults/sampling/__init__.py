"""Faults of sampling: acceptance, residuals, logits processing and the rows they read."""
