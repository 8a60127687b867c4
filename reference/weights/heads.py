"""The weights of draft heads, seeded or stored, under published names.

A head of a target with renamed tokens has the rows of its own vocabulary renamed alike.
"""

from functools import lru_cache

import numpy as np

from specverify.reference.architecture import Model, Seeded
from specverify.reference.draft.head import Head
from specverify.reference.draft_files import stored_head
from specverify.reference.trace import Array
from specverify.reference.weights.models import HEAD_GAIN, permutation, representable


@lru_cache(maxsize=128)
def _draw_head(head: Head, target: Seeded) -> dict[str, Array]:
    # The seed of the target enters as well, so that two targets have unlike heads.
    draw = np.random.default_rng((head.seed, target.seed, len(head.TAG)))
    state = {}
    for name, shape in head.tensors(target.architecture).items():
        noise = draw.normal(size=shape)
        if name.endswith("norm.weight"):
            values = 1.0 + 0.1 * noise
        elif name.endswith("bias"):
            values = 0.3 * noise
        else:
            values = noise * (HEAD_GAIN if name in head.by_token else 1.0) / np.sqrt(shape[-1])
        state[name] = representable(values)
    for name in head.by_token:
        renamed_rows = np.empty_like(state[name])
        # Row t becomes row `renamed[t]`, as in the embedding of the target.
        renamed_rows[permutation(target.relabel, target.vocab_size)] = state[name]
        state[name] = renamed_rows[list(head.vocabulary)] if head.vocabulary else renamed_rows
    if head.vocabulary:
        vocabulary = np.array(head.vocabulary)
        # Offsets, as published files have them: target id = draft id + d2t[draft id].
        state["d2t"] = vocabulary - np.arange(len(vocabulary))
        state["t2d"] = np.isin(np.arange(target.vocab_size), vocabulary)
    for array in state.values():
        array.flags.writeable = False
    return state


def seeded_head(head: Head, target: Seeded) -> dict[str, Array]:
    """The weights of `head` on `target`: read-only float64, matrices as [out, in]; d2t int64 and t2d bool if reduced.

    The tree of the head changes no weight.
    """
    return _draw_head(head.weights, target)


def head_weights(head: Head, target: Model) -> dict[str, Array]:
    """The weights of `head` on `target`, stored or seeded; see `seeded_head`.

    Raises:
        UnreadableCheckpoint: stored weights cannot be read, or are not those of the case.
    """
    if head.files is not None:
        return stored_head(head.weights, target)
    assert isinstance(target, Seeded), "a seeded head is made for a built-in target"
    return seeded_head(head, target)
