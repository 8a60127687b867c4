"""Shrinking: smaller cases and sessions next to a given one, simplest first."""
