"""Faults of serving: batches, state that leaks between requests, and overlap."""
