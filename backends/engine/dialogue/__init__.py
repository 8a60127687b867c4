"""Dialogues: requests that go on with the caches of the one before."""
