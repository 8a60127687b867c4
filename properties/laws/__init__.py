"""Exact laws of black boxes: samplers that turn coins into tokens.

The law is found by asking the sampler; `specverify.properties.laws.sampled` tests samplers that take no coins.
"""
