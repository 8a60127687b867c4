"""Findings in words and pictures: terminal page, JSON lines, JUnit, bundles. Only this room makes sentences."""
