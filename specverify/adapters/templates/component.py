"""One function of an engine as a backend of SpecVerify.

The rest of the engine is SpecVerify's own. The function below is a greedy verify kernel, so that this file runs as it
stands. Put yours in its place, or judge another kind of function, and run after each change:

    specverify check-adapter MODULE:open_
"""

import torch

from specverify.adapt import component


def verify(tokens: torch.Tensor, parent: torch.Tensor, logits: torch.Tensor) -> tuple[list[int], int]:
    """The accepted rows of the tree from the root (row 0) downwards, and the token after the last of them.

    The names of the parameters say what the function is given, as torch tensors without a batch axis: here tokens
    [nodes], parent [nodes] (the root is its own parent) and the target's logits [nodes, vocabulary]. Further names are
    next_token, next_sibling and best; `specverify.adapt.CONTRACTS["verify"]` describes them all.
    """
    # From here on: your kernel.
    path = [0]
    while True:
        best = int(logits[path[-1]].argmax())
        child = ((parent == path[-1]) & (tokens == best) & (torch.arange(len(tokens)) > 0)).nonzero()
        if len(child) == 0:
            return path, best
        path.append(int(child[0]))


# Other kinds: tree_builder, sampler, attention, commit, target; CONTRACTS describes each. `component` takes more facts
# where the function needs them: device="cuda", dtypes=("bfloat16",), trees="chains" (trees without branches alone).
open_ = component(verify=verify)
