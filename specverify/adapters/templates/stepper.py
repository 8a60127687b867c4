"""An engine as a backend of SpecVerify: a generator that yields its steps.

The engine below verifies the trees that it is given, path by path, so that this file runs as it stands. Put your
engine's one forward pass under a tree mask in its place, show further parts one by one, and run after each change:

    specverify check-adapter MODULE:open_
"""

from collections.abc import Iterator
from typing import Any

import torch

from specverify.adapt import stepper


def steps(
    prompt_ids: list[int], max_new_tokens: int, model: Any, trees: list[tuple[list[int], list[int]]]
) -> Iterator[dict[str, Any]]:
    """Yield a dict for each speculative step, with the parts that `shows` names below.

    `trees` are those to verify, one for each step: parents and tokens of the nodes, the root (the last token so far)
    first. Without the parameter the engine drafts in its own way. Further parameters are those of a black box: stops,
    temperature, seed, draft_model and more.
    """
    tokens, room, next_trees = list(prompt_ids), max_new_tokens, iter(trees)
    while room:
        parent, drafted = next(next_trees, ([0], [tokens[-1]]))
        # From here on: your engine. Node n is scored after the tokens so far and those of its path from the root.
        paths: list[list[int]] = [[]]
        for node in range(1, len(parent)):
            paths.append([*paths[parent[node]], drafted[node]])
        logits = torch.stack([model(torch.tensor([tokens + path]), use_cache=False).logits[0, -1] for path in paths])
        best, path = logits.argmax(-1).tolist(), [0]
        while (child := _child(parent, drafted, path[-1], best[path[-1]])) is not None:
            path.append(child)
        # Up to here. The block ends where the request is long enough.
        block = [*(drafted[node] for node in path[1:]), best[path[-1]]][:room]
        yield {"tokens": block, "tree": (parent, drafted), "logits": logits, "path": path, "bonus": best[path[-1]]}
        tokens, room = tokens + block, room - len(block)


def _child(parent: list[int], drafted: list[int], node: int, token: int) -> int | None:
    """The first child of `node` with this token."""
    return next((child for child in range(1, len(parent)) if (parent[child], drafted[child]) == (node, token)), None)


# Further parts are masks, positions, attention and KV caches; `specverify.adapt.PARTS` describes each.
# trees="ordered" says that the parents of its trees stand before their children.
open_ = stepper(steps, shows=("tree", "logits", "path", "bonus"), trees="ordered")
