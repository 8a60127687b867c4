"""Shrinking: smaller cases and sessions in the neighbourhood of a given one."""
