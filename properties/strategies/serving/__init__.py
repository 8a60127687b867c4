"""Strategies for how a server schedules the steps of a session."""
