"""The reports of a gate."""
