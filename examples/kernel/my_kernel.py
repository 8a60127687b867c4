"""An attention kernel in the place of SpecVerify's: every other part of the engine is SpecVerify's own."""

from specverify.adapt import component


def my_kernel(query, key, value, mask, scaling):
    # query [heads, rows, head_dim], key and value [kv_heads, columns, head_dim], mask [rows, columns]
    group = len(query) // len(key)
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    scores = query @ key.transpose(-1, -2) * scaling
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value


def wrong_kernel(query, key, value, mask, scaling):
    # Each row sees one column too many: the classic fault of a causal kernel that is given a tree.
    return my_kernel(query, key, value, mask | mask.roll(1, -1), scaling)


open_ = component(attention=my_kernel)
open_wrong = component(attention=wrong_kernel)
