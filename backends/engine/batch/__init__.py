"""Decisions for all requests of a batch at once."""
