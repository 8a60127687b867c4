"""Laws of black boxes: a sampler takes coins, and its exact law is found by asking it."""
