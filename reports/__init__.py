"""Findings in words and pictures: terminal page, JSON lines, JUnit, bundles; only this room makes sentences."""
