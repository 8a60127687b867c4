"""Audits of recorded traces: the commands `trace check` and `trace schema`."""
