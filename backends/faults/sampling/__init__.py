"""Faults of sampling: acceptance, residuals, logits processing, and logit rows."""
