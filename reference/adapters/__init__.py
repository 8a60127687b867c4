"""Adapters: the words of low-rank additions to a target's projections."""
