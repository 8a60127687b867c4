"""Faults of the output: emitted tokens, stops and log-probabilities."""
