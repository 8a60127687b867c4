"""Chance: what samples of a backend without a tape say about its law, with false-alarm rates that are proven."""
