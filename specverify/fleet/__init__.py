"""Runs that several machines share: their journals, and slices as tasks of Ray."""
