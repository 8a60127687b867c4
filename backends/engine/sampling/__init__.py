"""Batched sampling of drafts and acceptance by the rules of speculative sampling.

The modules hold coins, the laws of next tokens, the drawing of children, the acceptance rules, and whole rounds on
tables that stand in for models. A *law* is the probability distribution of a token; a *coin* is a uniform in [0, 1).
"""
