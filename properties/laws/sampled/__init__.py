"""Laws from samples: tests of draws with a stated error rate.

They serve where a backend's exact law cannot be enumerated.
"""
