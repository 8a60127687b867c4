"""Prefill in one process and decode in another, with a hand-over in between."""
