"""A real tree speculation engine in PyTorch, on any transformers causal model.

Its convention is *root pending*: the last emitted token is row 0 of the next tree, and its KV is not yet written. After
every step the committed cache therefore holds all tokens but the last.
"""
