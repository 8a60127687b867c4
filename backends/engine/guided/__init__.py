"""Guided decoding: the legal tokens at every node, by matchers that go back too."""
