"""The command `law`: the exact law of a sampler in a small world."""
