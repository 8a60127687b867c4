"""The command `law`: the exact law of a sampler in a small world, compared with the target's."""
