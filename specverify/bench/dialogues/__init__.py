"""Dialogues of several turns, timed with the cache kept from turn to turn."""
